"""What a user can get wrong. The command line turns each of these into one message and exit 2."""

from leviathan.credentials import without_credentials


class LeviathanError(Exception):
    """Base of every error a user can cause; its text says what, where, and what to do."""

    def __str__(self) -> str:
        return without_credentials(super().__str__())


class ConfigError(LeviathanError):
    """A configuration that cannot be used: a wrong key, value or combination."""


class OneRankError(ConfigError):
    """As ConfigError, of one process alone: the other ranks of its run know nothing of it."""


class DataError(LeviathanError):
    """A corpus, tokenizer or data set that is missing, damaged or does not fit."""


class CheckpointError(LeviathanError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""
