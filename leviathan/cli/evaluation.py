"""Scores, comparisons, and the report."""

from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import AsJson, Model, is_another_rank, show
from leviathan.console import say

Split = Annotated[str, typer.Option(help="`val` or `train`.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences at once.")]


def perplexity(
    checkpoint: Model,
    data: Annotated[
        Path,
        typer.Argument(
            help="A prepared dataset, or one in the `data.format` of CKPT's run.", metavar="DATA"
        ),
    ],
    split: Split = "val",
    batch_size: BatchSize = 8,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Move the window by so many tokens, not by the whole context."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Scores a whole split: nats per token, perplexity and bits per byte, also by subset.

    With `--stride 64` every token is scored after at least a context less 64 tokens; slower.

    Under `torchrun --nproc-per-node 8 -m leviathan perplexity …` the ranks share the work.
    """
    from leviathan.evaluate.perplexity import perplexity as run
    from leviathan.evaluate.perplexity import perplexity_table

    result = run(checkpoint, data, split=split, batch_size=batch_size, stride=stride)
    show(result, as_json, perplexity_table)


def frequency(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CKPT...")],
    data: Annotated[
        Path, typer.Option(help="A prepared dataset, or one in the first run's `data.format`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON and the plot.")] = None,
    split: Split = "val",
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
) -> None:
    """Validation loss by how often the target token occurs in the training split.

    With several checkpoints, also their paired differences, with 95 % intervals over documents if
    there are ten documents or more.

    Example: `leviathan frequency runs/tied runs/leviathan --data data/pile --out strata`
    """
    from leviathan.evaluate.frequency import frequency as run
    from leviathan.evaluate.frequency import frequency_table

    result = run(checkpoints, data, out, split, batch_size)
    if out is not None and not is_another_rank():
        from leviathan.analysis.plots import save_frequency

        save_frequency(result, out)
    show(result, as_json, frequency_table)


def evaluate(
    checkpoint: Model,
    tasks: Annotated[str, typer.Option(help="lm-eval task names, separated by commas.")],
    task_data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files; then nothing is downloaded.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples a task, else all.")] = None,
    batch_size: BatchSize = 8,
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

    Under `torchrun --nproc-per-node 8 -m leviathan eval …` the ranks share the requests; the
    results are those of one.

    Example: `leviathan eval runs/a --tasks piqa,lambada_openai --task-data data/eval --out scores`
    """
    from leviathan.evaluate.harness import results_table, run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    result = run_tasks(checkpoint, names, task_data, limit, batch_size, out)
    show(result, as_json, results_table)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, the first of the baseline; or one study's YAML file or folder.",
            metavar="RUN...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the page, its numbers and its plots.")],
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
    """Compares runs on one HTML page: curves, table, loss by token frequency, tasks, costs.

    Runs of one configuration with several seeds are one arm: figures are then means, with intervals
    over seeds, for four seeds or more. A run whose data, order, tokenizer or budget differs from
    that of its baseline is shown without a difference. OUT gets report.html, report.json, CSV
    tables and plots/ as SVG and PNG.

    Example: `leviathan report runs/tied runs/leviathan --out report`
    """
    from leviathan.analysis.report import build_report, terminal_table

    result = build_report(runs, out, allow_unequal)
    if track:
        from leviathan.train.tracker import attach

        images = {f"report/{file.stem}": file for file in sorted(out.glob("plots/*.png"))}
        for run in runs:
            if not attach(run, images):
                say(f"{run}: its configuration names no tracker; nothing is attached")
    show(result, as_json, terminal_table)


def inspect(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="One checkpoint, or two to compare.", metavar="CKPT..."),
    ],
    tokens: Annotated[
        str,
        typer.Option(help="Tokens whose neighbors to show: `the, def,#42` (text, or # and id)."),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Dataset of the token counts, else the run's own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for inspect.json and the plots as SVG and PNG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows the geometry of the input table: norms by frequency, effective rank, isotropy.

    With two checkpoints of one vocabulary, both side by side, whatever their kinds, and how alike
    they are. Blanks belong to a token: `' the'` and `the` are two.

    Example: `leviathan inspect runs/tied runs/leviathan --tokens 'def, return' --out geometry`
    """
    from leviathan.analysis.inspect import inspect as run
    from leviathan.analysis.inspect import inspect_text
    from leviathan.evaluate.input_table import read_tables, token_ids

    tables = read_tables(checkpoints, data)
    result = run(tables, token_ids(tables[0].tokenizer, tokens), out)
    show(result, as_json, inspect_text)
