"""Scaling fits and studies: the comparison as a whole."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from leviathan.cli.options import AsJson, Overrides, show
from leviathan.console import say

study_app = typer.Typer(
    no_args_is_help=True, help="Plan and carry out studies: many runs that answer one question."
)
StudyFile = Annotated[
    Path, typer.Argument(help="A study (configs/experiments).", metavar="STUDY.yaml")
]


def fit(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV with parameters, tokens, loss and, to compare, kind.", metavar="TABLE.csv"
        ),
    ],
    form: Annotated[
        Literal["auto", "n", "d", "nd"],
        typer.Option(help="L(N), L(D) or L(N, D); auto takes what the table can tell apart."),
    ] = "auto",
    baseline: Annotated[
        str | None, typer.Option(help="The kind to express the others in; else tied or the first.")
    ] = None,
    floor: Annotated[
        bool, typer.Option(help="Whether there is a loss E that nothing removes.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for fit.json and the plot as SVG and PNG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fits a scaling law to losses: exponents, effective capacity and data, with intervals.

    L = E + A·N^-α + B·D^-β by robust regression from many starts. For every row of another kind it
    says which N (or D) the baseline would need for the same loss. Also tells what the rows do not
    suffice for, and where printed columns contradict each other. Intervals need three rows more
    than the law has free parameters.

    Example: `leviathan fit configs/experiments/published.csv --out fit`
    """
    from leviathan.analysis.fit import fit_table, fit_text

    show(fit_table(table, form, baseline, floor, out), as_json, fit_text)


@study_app.command("plan")
def plan(study: StudyFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Says what a study will cost before anything starts: runs, tokens, FLOPs, memory, hours.

    Hours are reckoned for `machine` in the study (peak_tflops, mfu, devices).

    Example: `leviathan study plan configs/experiments/scales.yaml seeds=[1,2,3] machine.mfu=0.35`
    """
    from leviathan.study.expand import load_study
    from leviathan.study.plan import plan_study, plan_table

    show(plan_study(load_study(study, overrides)), as_json, plan_table)


@study_app.command("run")
def run(
    study: StudyFile,
    overrides: Overrides = None,
    emit: Annotated[
        Path | None,
        typer.Option(help="Train nothing: write one launch a run and a Slurm array there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Carries a study out here, run after run, and writes its report; passes over what is done.

    Stopped, with Ctrl-C too, the same command goes on where it was. `launch=` in the study, or as
    a change, names a launcher: `launch='torchrun --nproc-per-node 8'`.

    Example: `leviathan study run configs/experiments/ablation_small.yaml seeds=[1,2]`
    """
    from leviathan.study.expand import load_study
    from leviathan.study.plan import plan_table

    loaded = load_study(study, overrides)
    if emit is not None:
        from leviathan.study.emit import emit_study

        written = emit_study(loaded, emit)
        say(f"Wrote {len(written['files']['scripts'])} launches and {written['files']['array']}")
        show(written, as_json, plan_table)
        return
    from leviathan.analysis.report import build_report, report_text
    from leviathan.study.execute import run_study

    planned = run_study(loaded)
    out = loaded.config.out / "report"
    report = build_report([loaded.config.out], out)
    say(f"The report: {out / 'report.html'}", style="bold")
    show(planned | {"report": report}, as_json, lambda result: report_text(result["report"]))
