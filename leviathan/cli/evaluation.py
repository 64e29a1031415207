"""`leviathan perplexity`, `frequency`, `eval`, `report` and `inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import AsJson, Model, is_another_rank, show
from leviathan.console import say

Split = Annotated[str, typer.Option(help="Split: `val` or `train`.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per forward pass.")]


def perplexity(
    checkpoint: Model,
    data: Annotated[
        Path,
        typer.Argument(
            help="Dataset from `leviathan prep`, or in the `data.format` of the run.",
            metavar="DATA",
        ),
    ],
    split: Split = "val",
    batch_size: BatchSize = 8,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stride of the sliding window, in tokens. Default: the context length."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Computes loss (nats per token), perplexity and bits per byte of a split and its subsets.

    With `--stride S`, every token is predicted from at least seq_len − S preceding tokens, which is
    slower. Under a launcher, as in `torchrun --nproc-per-node 8 -m leviathan perplexity …`, the
    ranks share the work.
    """
    from leviathan.evaluate.perplexity import perplexity as run
    from leviathan.evaluate.perplexity import perplexity_table

    result = run(checkpoint, data, split=split, batch_size=batch_size, stride=stride)
    show(result, as_json, perplexity_table)


def frequency(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...")],
    data: Annotated[
        Path,
        typer.Option(
            help="Dataset from `leviathan prep`, or in the `data.format` of the first run."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Output directory for JSON and plot.")] = None,
    split: Split = "val",
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
) -> None:
    """Computes the validation loss by the training frequency of the target token.

    For several checkpoints, also computes their paired differences, with 95 % intervals over
    documents if there are at least ten.

    Example: `leviathan frequency runs/tied runs/leviathan --data data/pile --out frequency`
    """
    from leviathan.evaluate.frequency import frequency as run
    from leviathan.evaluate.frequency import frequency_table

    result = run(checkpoints, data, out, split, batch_size)
    if out is not None and not is_another_rank():
        from leviathan.report.figures import save_frequency

        save_frequency(result, out)
    show(result, as_json, frequency_table)


def evaluate(
    checkpoint: Model,
    tasks: Annotated[str, typer.Option(help="lm-eval task names, separated by commas.")],
    task_data: Annotated[
        Path | None,
        typer.Option(help="Directory with the task data. Default: download from the Hub."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum samples per task. Default: all.")
    ] = None,
    batch_size: BatchSize = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output directory for lm-eval's results and the scores of each sample, as JSON."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Runs lm-eval tasks on a checkpoint.

    With `--task-data`, hellaswag, arc_easy, arc_challenge, piqa, winogrande, lambada_openai and
    wikitext are read from local JSONL or Parquet files with the columns of the Hub. Other tasks are
    downloaded, as are these without `--task-data`. Results are also stored in the run directory.

    Under a launcher, as in `torchrun --nproc-per-node 8 -m leviathan eval …`, the ranks share the
    requests.

    Example: `leviathan eval runs/a --tasks piqa,lambada_openai --task-data data/eval --out scores`
    """
    from leviathan.evaluate.harness.model import results_table, run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    result = run_tasks(checkpoint, names, task_data, limit, batch_size, out)
    show(result, as_json, results_table)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, the baseline first; or an experiment's YAML file or directory.",
            metavar="RUN...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    allow_unequal: Annotated[
        bool,
        typer.Option(
            "--allow-unequal",
            help="Also compare runs that differ in data, data order, tokenizer or budget.",
        ),
    ] = False,
    track: Annotated[
        bool,
        typer.Option(
            "--track", help="Attach the plots to the runs in Weights & Biases and TensorBoard."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compares runs in an HTML report: curves, table, loss by token frequency, tasks, costs.

    Runs that differ only in the seed form one arm and are averaged, with intervals for four or more
    seeds. Runs whose data, data order, tokenizer or budget differ from the baseline's are shown
    without a comparison. Writes report.html, report.json, CSV tables and plots as SVG and PNG.

    Example: `leviathan report runs/tied runs/leviathan --out report`
    """
    from leviathan.report.report import build_report
    from leviathan.report.tables import terminal_table

    result = build_report(runs, out, allow_unequal)
    if track:
        from leviathan.train.trackers import attach

        images = {f"report/{file.stem}": file for file in sorted(out.glob("plots/*.png"))}
        for run in runs:
            if not attach(run, images):
                say(f"{run}: no tracker is configured, so plots are not attached")
    show(result, as_json, terminal_table)


def inspect(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="One checkpoint, or two to compare.", metavar="CKPT..."),
    ],
    tokens: Annotated[
        str,
        typer.Option(
            help="Tokens whose nearest neighbors to show, as text or #id: `the, def,#42`."
        ),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Dataset for the token counts. Default: that of the run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output directory for inspect.json and plots.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the geometry of the input embedding: norms by frequency, effective rank, isotropy.

    For two checkpoints with the same vocabulary, also shows their similarity. Spaces are part of a
    token: `' the'` and `the` differ.

    Example: `leviathan inspect runs/tied runs/leviathan --tokens 'def, return' --out geometry`
    """
    from leviathan.evaluate.input_table import read_tables, token_ids
    from leviathan.report.geometry import inspect as run
    from leviathan.report.geometry import inspect_text

    tables = read_tables(checkpoints, data)
    result = run(tables, token_ids(tables[0].tokenizer, tokens), out)
    show(result, as_json, inspect_text)
