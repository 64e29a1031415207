"""Advisory file locks. The operating system releases them when the process ends.

`flock` rather than a library: shared locks are needed (slices of one preparation, open shards of a
cache), and the caches lock files that others rename or remove.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def try_lock(file: IO[bytes], shared: bool = False) -> bool:
    """Locks an open file without waiting; returns whether it succeeded."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[bytes], shared: bool = False) -> None:
    """Locks an open file, waiting for other holders."""
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def is_file_at(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file is still the one at `path`, neither renamed nor removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether another process holds an exclusive lock on the file at `path`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return not try_lock(file, shared=True)


@contextmanager
def lock_file(path: Path, shared: bool = False) -> Iterator[None]:
    """Creates and locks the file at `path`; its last holder removes it.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be created.
    """
    while True:
        file = path.open("ab")
        if not try_lock(file, shared):
            file.close()
            raise BlockingIOError(f"{path} is locked")
        if is_file_at(path, file):
            break
        file.close()  # the previous holder removed it between `open` and the lock
    try:
        yield
    finally:
        if try_lock(file):  # no other holder of a shared lock is left
            path.unlink(missing_ok=True)
        file.close()
