"""Errors caused by user input. The command line prints them without a traceback and exits with 2.

Each has a stable code (`run_dir.locked`), on which tests and scripts rely, and a message, whose
wording may change.
"""

from leviathan.credentials import without_credentials


class LeviathanError(Exception):
    """Base class of errors caused by user input.

    Args:
        code: `subject.condition`, stable.
        message: what happened, where, what was expected, and what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return without_credentials(self.message)


class ConfigError(LeviathanError):
    """An invalid configuration: a wrong key, value or combination."""


class LocalRankError(ConfigError):
    """A ConfigError on this rank only, which the other ranks cannot report."""


class DataError(LeviathanError):
    """A corpus, tokenizer or dataset that is missing, corrupt or does not match."""


class CheckpointError(LeviathanError):
    """A checkpoint that is missing, incomplete, corrupt or of another model."""
