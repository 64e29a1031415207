"""`leviathan export`, `import` and `generate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import AsJson, Checkpoint, Model, show


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="Output directory.")],
    dtype: Annotated[str, typer.Option(help="Weight type: fp32, bf16 or fp16.")] = "fp32",
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Load the result with transformers and compare the logits."),
    ] = False,
    add_bos: Annotated[
        bool,
        typer.Option(
            "--add-bos", help="Export a tokenizer that prepends end-of-text to each text."
        ),
    ] = False,
    shard_size: Annotated[str, typer.Option(help="Maximum size of a safetensors file.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Exports a checkpoint as a Hugging Face Llama model: weights, config, tokenizer, model card.

    The input embedding is materialized as a table, so that every Llama engine can serve the model.
    """
    from leviathan.hf.export import export as run

    result = run(
        checkpoint, out, dtype=dtype, verify=verify, add_bos=add_bos, shard_size=shard_size
    )
    show(result, as_json)


def import_(
    folder: Annotated[Path, typer.Argument(help="Directory of a Hugging Face Llama model.")],
    run_dir: Annotated[Path, typer.Argument(help="Run directory to create.")],
    as_json: AsJson = False,
) -> None:
    """Imports a Hugging Face Llama model as a checkpoint of kind tied or untied.

    The tokenizer must be a byte-level BPE, as in Llama 3. Unsupported components are refused by
    name, and the token ids of more than 1,000 texts are compared with those of transformers.
    `leviathan export` writes the tokenizer unchanged.
    """
    from leviathan.hf.importer import import_llama

    show(import_llama(folder, run_dir), as_json)


def generate(
    checkpoint: Model,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; repeatable.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="File with one prompt per line, or .jsonl with `prompt`.")
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum new tokens per prompt, limited by the remaining context."
        ),
    ] = 100,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 selects the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Nucleus sampling: cumulative probability to sample from.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop sequence; repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Generates text. A single prompt is streamed to the terminal.

    Example: `leviathan generate runs/a --prompt 'import ' --temperature 0.8 --top-p 0.95`
    """
    from leviathan.evaluate.generate import as_text, generate_texts, read_prompts, show_stream
    from leviathan.model.kv_cache import Sampling

    prompts = [*(prompt or []), *(read_prompts(file) if file else [])]
    live = len(prompts) == 1 and sys.stdout.isatty() and not as_json
    result = generate_texts(
        checkpoint,
        prompts,
        max_new_tokens,
        Sampling(temperature, top_p, seed),
        stop or [],
        batch,
        show_stream(prompts[0]) if live else None,
    )
    if live:
        print()
    else:
        show(result, as_json, as_text)
