"""The command line: one function per command, with imports inside the function.

Results go to standard output (with `--json`, one object on the last line), everything else to
standard error. Exit status: 0 success, 2 invalid input or configuration, 1 internal error.
"""

import errno
import os
import sys
from typing import NoReturn

import typer

from leviathan.cli import check, data, evaluation, experiments, export, launch, params, training
from leviathan.cli.options import is_another_rank
from leviathan.console import console
from leviathan.credentials import without_credentials
from leviathan.errors import LeviathanError, LocalRankError

app = typer.Typer(
    name="leviathan",
    help="A pretraining stack for small language models: prepare a corpus, train, evaluate, "
    "compare input embeddings, and export Llama models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)
app.command("prep")(data.prep)
app.command("params")(params.params)
app.command("check")(check.check)
app.command("train")(training.train)
app.command("launch")(launch.launch)
app.command("perplexity")(evaluation.perplexity)
app.command("frequency")(evaluation.frequency)
app.command("eval")(evaluation.evaluate)
app.command("report")(evaluation.report)
app.command("inspect")(evaluation.inspect)
app.command("fit")(experiments.fit)
app.command("export")(export.export)
app.command("import")(export.import_)
app.command("generate")(export.generate)
app.add_typer(data.tokenizer_app, name="tokenizer")
app.add_typer(data.data_app, name="data")
app.add_typer(training.checkpoint_app, name="checkpoint")
app.add_typer(experiments.experiment_app, name="experiment")


def main() -> None:
    """Entry point. A user's error is printed as one message with exit status 2."""
    try:
        app()
    except LeviathanError as error:
        _fail(str(error), error.code, shared=not isinstance(error, LocalRankError))
    except OSError as error:
        # A full or unwritable disk, or a directory instead of a file.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(f"{error.filename or 'writing'}: {error.strerror}", "io.failed")


def _fail(message: str, code: str, shared: bool = True) -> NoReturn:
    """Prints one message and exits with status 2.

    Args:
        message: the problem, where, and what to do.
        code: code of the error, as in `LeviathanError.code`.
        shared: whether all ranks of the launch have this error; then only rank 0 prints it.
            Commands without ranks always print: RANK may be set in their environment, too.
    """
    another = is_another_rank()
    if not (another and shared):
        who = f"rank {os.environ['RANK']}: " if another else ""
        text = without_credentials(f"error: [{code}] {who}{message}")
        console.print(text, style="red", markup=False)
    sys.exit(2)
