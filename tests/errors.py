"""Assertions on errors: their codes and the names they mention, not their wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from leviathan.errors import LeviathanError


@contextmanager
def raises_error(
    code: str, *names: object, error: type[LeviathanError] = LeviathanError
) -> Iterator[pytest.ExceptionInfo[LeviathanError]]:
    """Asserts that the body raises an error with this code, whose message contains all names.

    Args:
        code: `LeviathanError.code`.
        names: paths, keys, values and numbers that a user needs in the message.
        error: expected type.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    for name in names:
        assert str(name) in str(caught.value)
