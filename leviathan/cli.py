"""The command line: one function a sub-command, each importing only what it needs, when it does.

Results go to standard output (with `--json` one object on its last line), everything else to
standard error. Exit status: 0 done, 2 wrong input, 1 our fault.
"""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import BaseModel

from leviathan.config.load import load_config, read_config, validate
from leviathan.config.schema import ModelFile, PrepConfig, RunConfig
from leviathan.console import console, say
from leviathan.errors import ConfigError, LeviathanError

C = TypeVar("C", bound=BaseModel)

app = typer.Typer(
    name="leviathan",
    help="Prepare a corpus, train small language models with tied or Leviathan input embeddings, "
    "compare them, and export them as Llama checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer.")
data_app = typer.Typer(no_args_is_help=True, help="Look into a prepared data set, or check it.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="List, describe and verify checkpoints.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")

Config = Annotated[Path, typer.Argument(help="YAML configuration.", metavar="CONFIG.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to it, as `section.key=value`.", metavar="a.b=c"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="A step folder, or a run folder, whose newest whole checkpoint is then taken.",
        metavar="CKPT",
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        help="A step folder, a run folder (its newest whole checkpoint), or a Llama folder.",
        metavar="CKPT",
    ),
]


def _show(
    result: dict[str, Any], as_json: bool, as_text: Callable[[dict[str, Any]], str] | None = None
) -> None:
    """Prints a result: one JSON line, or as people read it."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        print((as_text or _lines)(result))


def _lines(result: dict[str, Any]) -> str:
    """A result without a table of its own: a line a value."""
    lines: list[str] = []
    for key, value in result.items():
        if value is None:
            continue
        if isinstance(value, dict) and all(isinstance(part, dict) for part in value.values()):
            lines += [f"{key:>24}  {name}: {_plain(parts)}" for name, parts in value.items()]
        else:
            lines.append(f"{key:>24}  {_plain(value)}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """A value as people read it: 1,234 and a = 1, b = 2."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[list[Path], typer.Argument(help="jsonl files (plain, .zst, .gz).")],
    vocab_size: Annotated[int, typer.Option(help="Entries in the file, 256 bytes included.")],
    out: Annotated[Path, typer.Option(help="The file to write, ending in .tiktoken.")],
) -> None:
    """Trains a byte-level BPE and writes it in tiktoken's rank format.

    The end-of-text id is the one after the last entry, so a file of N entries gives a vocabulary
    of N + 1 ids. Text is split by o200k_base's pattern.

    Example: `leviathan tokenizer train corpus/*.jsonl.zst --vocab-size 8192 --out bpe.tiktoken`
    """
    from leviathan.data.tokenizer import train_bpe

    train_bpe(files, vocab_size, out)
    say(f"{out}: {vocab_size:,} entries")


@app.command("prep")
def prep(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Turns a corpus into a tokenised streaming (MDS) data set.

    Run again, it continues where it stopped, or says that the data set is complete. With
    `executor=rank`, each of many processes (RANK and WORLD_SIZE, or a Slurm array) tokenises its
    slice of the files, and `leviathan data merge` ends the work; with `executor=ray`, a Ray cluster
    does it all.

    Example: `leviathan prep configs/data/pile.yaml 'source.paths=pile/*.jsonl.zst' out=data/pile`
    """
    loaded = load_config(config, overrides or [], PrepConfig)
    from leviathan.data.prepare.pipeline import prepare

    _show(prepare(loaded), as_json, _data_table)


@data_app.command("merge")
def data_merge(
    out: Annotated[Path, typer.Argument(help="The data set to make; may hold slices itself.")],
    others: Annotated[
        list[Path] | None, typer.Argument(help="Further folders that slices were written to.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Packs what the slices of `leviathan prep executor=rank` have left.

    The bytes are those that one machine alone would have written. A missing slice is named.

    Example: `leviathan data merge data/pile --workers 16`
    """
    from leviathan.data.prepare.merge import merge

    _show(merge(out, others or [], workers), as_json, _data_table)


@data_app.command("split")
def data_split(
    source: Annotated[Path, typer.Argument(help="A finished data set.", metavar="SRC")],
    out: Annotated[Path, typer.Option(help="Folder for the data sets, one a subset.")],
    by: Annotated[str, typer.Option(help="`subset` is all there is.")] = "subset",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Makes one complete data set per subset from a finished one; nothing is tokenised again.

    Example: `leviathan data split data/pile --by subset --out data/pile-subsets`
    """
    if by != "subset":
        raise ConfigError(f"--by {by}: data sets are split by subset only")
    from leviathan.data.prepare.split import split_by_subset

    _show(split_by_subset(source, out, workers), as_json)


@data_app.command("verify")
def data_verify(
    directory: Path,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Checks every file of a data set against its hashes and counts; exit 2 names what is wrong.

    Example: `leviathan data verify data/pile --workers 16`
    """
    from leviathan.data.prepare.verify import verify

    _show(verify(directory, workers), as_json, _data_table)


@data_app.command("info")
def data_info(directory: Path, as_json: AsJson = False) -> None:
    """Shows what a data set holds: documents, tokens, rows and subsets, tokenizer, fingerprint."""
    from leviathan.data.format import DatasetInfo

    _show(DatasetInfo.load(directory).summary(), as_json, _data_table)


@data_app.command("show")
def data_show(
    directory: Path,
    split: Annotated[str, typer.Option(help="`train` or `val`.")] = "train",
    row: Annotated[int, typer.Option(help="Number of the first row, from 0.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Decodes rows: the documents in them, where they begin and end, their subsets, the padding.

    Example: `leviathan data show data/pile --row 1000 --rows 2`
    """
    from leviathan.data.show import rows_text, show_rows

    _show(show_rows(directory, split, row, rows), as_json, rows_text)


def _data_table(summary: dict[str, Any]) -> str:
    """A data set's summary as tables; what a slice of one has done, a line a value."""
    if "splits" not in summary:
        return _lines(summary)
    from leviathan.data.show import info_table

    verified = "\nverified: every hash and count is right" if summary.get("verified") else ""
    return info_table(summary) + verified


@app.command("params")
def params(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Counts parameters by part, FLOPs per token and memory of a model or run configuration.

    Example: `leviathan params configs/model/400m.yaml model.embedding.kind=tied`
    """
    from dataclasses import asdict

    data, origins = read_config(config, overrides or [])
    schema: type[ModelFile | RunConfig] = RunConfig if set(data) - {"model"} else ModelFile
    model = validate(data, schema, str(config), origins).model
    from leviathan.model.accounting import account

    _show(asdict(account(model)), as_json)


@app.command("train")
def train(config: Config, overrides: Overrides = None) -> None:
    """Trains a model; alone, or as one rank of `deepspeed`, `torchrun` or `srun`.

    The same command resumes an interrupted run from its newest whole checkpoint. SIGTERM or SIGUSR1
    to any rank saves and ends it with exit status 0.

    Example: `deepspeed --num_accelerators 2 launch/train.py configs/run/quickstart.yaml`
    """
    loaded = load_config(config, overrides or [], RunConfig)
    from leviathan.train.loop import train as run

    run(loaded)


@checkpoint_app.command("ls")
def checkpoint_ls(run_dir: Path, as_json: AsJson = False) -> None:
    """Lists a run's complete checkpoints, oldest first: where they stand and what wrote them.

    Contents are not read; `verify` does that.
    """
    from leviathan.checkpoint.describe import checkpoints_table, list_checkpoints

    _show(list_checkpoints(run_dir), as_json, checkpoints_table)


@checkpoint_app.command("info")
def checkpoint_info(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Shows step, tokens, model, engine and size of one checkpoint."""
    from leviathan.checkpoint.describe import checkpoint_info as info
    from leviathan.checkpoint.layout import resolve_checkpoint

    _show(info(resolve_checkpoint(checkpoint)), as_json)


@checkpoint_app.command("verify")
def checkpoint_verify(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Checks every file of a checkpoint against its manifest; exit 2 names what is wrong."""
    from leviathan.checkpoint.layout import resolve_checkpoint
    from leviathan.checkpoint.manifest import verify_manifest

    path = resolve_checkpoint(checkpoint)
    _show({"checkpoint": str(path), "files": verify_manifest(path)}, as_json)


@app.command("perplexity")
def perplexity(
    checkpoint: Model,
    data: Annotated[Path, typer.Argument(help="A prepared data set.", metavar="DATA")],
    split: Annotated[str, typer.Option(help="`val` or `train`.")] = "val",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Move the window by so many tokens, not by the whole context."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Scores a whole split: nats per token, perplexity and bits per byte, also by subset.

    With `--stride 64` every token is scored after at least a context less 64 tokens; slower.
    """
    from leviathan.evaluate.perplexity import perplexity as run
    from leviathan.evaluate.perplexity import perplexity_table

    result = run(checkpoint, data, split=split, batch_size=batch_size, stride=stride)
    _show(result, as_json, perplexity_table)


@app.command("frequency")
def frequency(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...")],
    data: Annotated[Path, typer.Option(help="A prepared data set.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON and the plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Validation loss by how often the target token occurs in the training split.

    With several checkpoints, also their paired differences with bootstrap intervals over documents.
    """
    from leviathan.evaluate.frequency import frequency as run
    from leviathan.evaluate.frequency import frequency_table

    result = run(checkpoints, data, out)
    if out is not None:
        from leviathan.analysis.plots import save_frequency

        save_frequency(result, out)
    _show(result, as_json, frequency_table)


@app.command("eval")
def evaluate(
    checkpoint: Model,
    tasks: Annotated[str, typer.Option(help="lm-eval task names, separated by commas.")],
    task_data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files; then nothing is downloaded.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples a task, else all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for lm-eval's results and every sample's scores as JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Runs lm-eval tasks on a checkpoint.

    hellaswag, arc_easy, arc_challenge, piqa, winogrande, lambada_openai and wikitext are read from
    `--task-data` (jsonl or parquet with the Hub's columns, found by task and split) or, without it,
    fetched from the Hub as any other task of lm-eval. Results are filed beside the run.

    Example: `leviathan eval runs/a --tasks piqa,lambada_openai --task-data data/eval --out scores`
    """
    from leviathan.evaluate.harness import results_table, run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    result = run_tasks(checkpoint, names, task_data, limit, batch_size, out)
    _show(result, as_json, results_table)


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is the baseline.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.json.")],
    as_json: AsJson = False,
) -> None:
    """Compares runs on one HTML page: curves, table, loss by token frequency, costs."""
    from leviathan.analysis.report import build_report, terminal_table

    result = build_report(runs, out)
    _show(result, as_json, terminal_table)


@app.command("export")
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

    The input embedding is materialised into an ordinary table, so any Llama engine serves it.
    """
    from leviathan.export.hf_llama import export as run

    result = run(
        checkpoint, out, dtype=dtype, verify=verify, add_bos=add_bos, shard_size=shard_size
    )
    _show(result, as_json)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face Llama folder.")],
    run_dir: Annotated[Path, typer.Argument(help="The run folder to make.")],
    as_json: AsJson = False,
) -> None:
    """Makes a native checkpoint of kind tied or untied from a Llama folder: weights, no moments.

    Its tokenizer must be a byte-level BPE, as Llama 3's is and ours are.
    """
    from leviathan.export.from_llama import import_llama

    _show(import_llama(folder, run_dir), as_json)


@app.command("generate")
def generate(
    checkpoint: Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to continue; repeatable.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A prompt a line, or .jsonl with `prompt`.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many a prompt.")] = 100,
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
        _show(result, as_json, as_text)


def main() -> None:
    """Entry of the console script: a user's error is one message and exit status 2."""
    try:
        app()
    except LeviathanError as error:
        _fail(str(error))
    except OSError as error:
        # A full or unwritable disk, a file that is a folder: the user's to mend, where it is named.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(f"{error.filename or 'writing'}: {error.strerror}")


def _fail(message: str) -> NoReturn:
    """Ends with exit status 2; an error of another rank than the first is never swallowed."""
    rank = os.environ.get("RANK", "0")
    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    if rank == "0" or not launched:
        console.print(f"error: {message}", style="red", markup=False)
    sys.exit(2)


if __name__ == "__main__":
    main()
