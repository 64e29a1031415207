"""`leviathan fit` and `leviathan experiment`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from leviathan.cli.options import AsJson, Overrides, show
from leviathan.console import say

experiment_app = typer.Typer(
    no_args_is_help=True, help="Plan and run experiments: sets of runs that answer one question."
)
ExperimentFile = Annotated[
    Path,
    typer.Argument(
        help="Experiment configuration (configs/experiments).", metavar="EXPERIMENT.yaml"
    ),
]


def fit(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV file with the columns parameters, tokens, loss and, for comparisons, kind.",
            metavar="TABLE.csv",
        ),
    ],
    form: Annotated[
        Literal["auto", "n", "d", "nd"],
        typer.Option(
            help="Form of the law: L(N), L(D) or L(N, D). auto: the form that the table identifies."
        ),
    ] = "auto",
    baseline: Annotated[
        str | None,
        typer.Option(help="Kind to compare the others with. Default: tied, or the first."),
    ] = None,
    floor: Annotated[bool, typer.Option(help="Fit an irreducible loss E.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Output directory for fit.json and the plot.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fits a scaling law to losses: exponents, effective capacity and data, with intervals.

    Fits L = E + A·N^-α + B·D^-β by robust regression from many starting points. For each row of
    another kind, computes the N (or D) that the baseline needs for the same loss. Reports
    undetermined parameters and columns that contradict each other. Intervals require three more
    rows than the law has free parameters.

    Example: `leviathan fit configs/experiments/published.csv --out fit`
    """
    from leviathan.report.fit import fit_table, fit_text

    show(fit_table(table, form, baseline, floor, out), as_json, fit_text)


@experiment_app.command("plan")
def plan(experiment: ExperimentFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Estimates the cost of an experiment: runs, tokens, FLOPs, memory and hours.

    Hours are estimated for `machine` of the experiment (peak_tflops, mfu, devices).

    Example: `leviathan experiment plan configs/experiments/scales.yaml seeds=[1,2,3]`
    """
    from leviathan.experiments.expand import load_experiment
    from leviathan.experiments.plan import plan_experiment, plan_table

    show(plan_experiment(load_experiment(experiment, overrides)), as_json, plan_table)


@experiment_app.command("run")
def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    emit: Annotated[
        Path | None,
        typer.Option(
            help="Output directory for a script per run and a Slurm array; nothing is trained."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Runs an experiment sequentially on this host and writes its report.

    Finished runs are skipped, so the same command resumes an interrupted experiment. The key
    `launch` selects a launcher: `launch='torchrun --nproc-per-node 8'`.

    Example: `leviathan experiment run configs/experiments/ablation_small.yaml seeds=[1,2]`
    """
    from leviathan.experiments.expand import load_experiment
    from leviathan.experiments.plan import plan_table

    loaded = load_experiment(experiment, overrides)
    if emit is not None:
        from leviathan.experiments.emit import emit_experiment

        written = emit_experiment(loaded, emit)
        say(f"Wrote {len(written['files']['scripts'])} scripts and {written['files']['array']}")
        show(written, as_json, plan_table)
        return
    from leviathan.experiments.execute import run_experiment
    from leviathan.report.report import build_report, report_text

    planned = run_experiment(loaded)
    out = loaded.config.out / "report"
    report = build_report([loaded.config.out], out)
    say(f"Report: {out / 'report.html'}", style="bold")
    show(planned | {"report": report}, as_json, lambda result: report_text(result["report"]))
