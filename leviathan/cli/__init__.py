"""The command line: one function a sub-command, each importing only what it needs, when it does.

Results go to standard output (with `--json` one object on its last line), everything else to
standard error. Exit status: 0 done, 2 wrong input, 1 our fault.
"""

import errno
import os
import sys
from typing import NoReturn

import typer

from leviathan.cli import checking, data, evaluation, handover, launching, sizes, studies, training
from leviathan.cli.options import is_another_rank
from leviathan.console import console
from leviathan.credentials import without_credentials
from leviathan.errors import LeviathanError, LocalRankError

app = typer.Typer(
    name="leviathan",
    help="Prepare a corpus, train small language models with tied or Leviathan input embeddings, "
    "compare them, and export them as Llama checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
)
app.command("prep")(data.prep)
app.command("params")(sizes.params)
app.command("check")(checking.check)
app.command("train")(training.train)
app.command("launch")(launching.launch)
app.command("perplexity")(evaluation.perplexity)
app.command("frequency")(evaluation.frequency)
app.command("eval")(evaluation.evaluate)
app.command("report")(evaluation.report)
app.command("inspect")(evaluation.inspect)
app.command("fit")(studies.fit)
app.command("export")(handover.export)
app.command("import")(handover.import_)
app.command("generate")(handover.generate)
app.add_typer(data.tokenizer_app, name="tokenizer")
app.add_typer(data.data_app, name="data")
app.add_typer(training.checkpoint_app, name="checkpoint")
app.add_typer(studies.study_app, name="study")


def main() -> None:
    """Entry of the console script: a user's error is one message and exit status 2."""
    try:
        app()
    except LeviathanError as error:
        _fail(str(error), error.code, shared=not isinstance(error, LocalRankError))
    except OSError as error:
        # A full or unwritable disk, a file that is a folder: the user's to mend, where it is named.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(f"{error.filename or 'writing'}: {error.strerror}", "io.failed")


def _fail(message: str, code: str, shared: bool = True) -> NoReturn:
    """Prints one message and exits with status 2.

    Args:
        message: what is wrong, where, and what to do.
        code: code of the error, as in `LeviathanError.code`.
        shared: whether all ranks of the launch have this error; then only rank 0 prints it.
            Commands without ranks always print: RANK may be set in their environment, too.
    """
    another = is_another_rank()
    if not (another and shared):
        who = f"rank {os.environ['RANK']}: " if another else ""
        text = without_credentials(f"error[{code}]: {who}{message}")
        console.print(text, style="red", markup=False)
    sys.exit(2)
