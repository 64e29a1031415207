"""Trained models out of the house and into it, and what they write."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import AsJson, Checkpoint, Model, show


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Load with transformers, compare logits."),
    ] = False,
    add_bos: Annotated[
        bool,
        typer.Option("--add-bos", help="The tokenizer puts end-of-text before texts by itself."),
    ] = False,
    shard_size: Annotated[str, typer.Option(help="Of a safetensors file at most.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Writes a Hugging Face Llama folder: weights, config, fast tokenizer, model card.

    The input embedding is materialized into an ordinary table, so any Llama engine serves it.
    """
    from leviathan.export.hf_llama import export as run

    result = run(
        checkpoint, out, dtype=dtype, verify=verify, add_bos=add_bos, shard_size=shard_size
    )
    show(result, as_json)


def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face Llama folder.")],
    run_dir: Annotated[Path, typer.Argument(help="The run folder to make.")],
    as_json: AsJson = False,
) -> None:
    """Makes a native checkpoint of kind tied or untied from a Llama folder: weights, no moments.

    Its tokenizer must be a byte-level BPE, like that of Llama 3. Components that cannot be
    reproduced are refused by name, and the token ids of more than 1,000 texts are compared with
    those of transformers before anything is written. `leviathan export` writes the tokenizer
    unchanged.
    """
    from leviathan.export.from_llama import import_llama

    show(import_llama(folder, run_dir), as_json)


def generate(
    checkpoint: Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to continue; repeatable.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A prompt a line, or .jsonl with `prompt`.")
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum new tokens per prompt, limited by the remaining context."
        ),
    ] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from so much of the probability.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Continues texts; on a terminal, one prompt's text is shown while it comes.

    Example: `leviathan generate runs/a --prompt 'import ' --temperature 0.8 --top-p 0.95`
    """
    from leviathan.generate import as_text, generate_texts, read_prompts, show_stream
    from leviathan.model.decode import Sampling

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
