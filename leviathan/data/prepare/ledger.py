"""The state of a preparation in its output folder: one writer, one configuration, finished parts.

While it runs, `out/.prep/` holds `config.json` (what is being made), `parts/NNNNN/` (one finished
corpus file each) and half-packed splits. `dataset.json` is written last; then `.prep` goes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leviathan.data.files import write_atomic
from leviathan.data.format import DATASET_FILE, WORK_FOLDER
from leviathan.data.prepare.tokenise import PartInfo, Task
from leviathan.errors import DataError

LOCK_FILE = ".prep.lock"


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Holds the folder's lock; the system frees it when the process ends, however it ends.

    Raises:
        DataError: another process is writing there, or the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(out / LOCK_FILE)
    except BlockingIOError:
        raise DataError(
            f"another preparation is writing to {out}: wait for it, or choose another out"
        ) from None
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror}") from None
    try:
        yield
    finally:
        (out / LOCK_FILE).unlink(missing_ok=True)
        os.close(descriptor)
        if not any(out.iterdir()):
            out.rmdir()


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former holder may have removed the file between our open and our lock.
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


class Ledger:
    """The work folder of one preparation. Create it only while holding `sole_writer`.

    Leaving its context removes the folder if no finished work would be lost.

    Raises:
        DataError: the folder holds something else, or another configuration's work.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.work = out / WORK_FOLDER
        self.parts = self.work / "parts"
        path = self.work / "config.json"
        others = sorted(p.name for p in out.iterdir() if p.name not in (WORK_FOLDER, LOCK_FILE))
        if not path.is_file():
            if others:
                raise DataError(
                    f"{out} is not empty (it holds {', '.join(others[:5])}) and was not begun by "
                    "`leviathan prep`: choose another out, or empty it"
                )
            try:
                self.work.mkdir(exist_ok=True)
                write_atomic(path, json.dumps(identity, indent=2).encode())
            except OSError:
                shutil.rmtree(self.work, ignore_errors=True)
                raise
        try:
            begun = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            raise DataError(f"{path} is damaged: remove {self.work} and prepare again") from None
        check_same(begun, identity, out)

    def __enter__(self) -> "Ledger":
        self.parts.mkdir(exist_ok=True)
        for leftover in self.parts.glob("*.tmp"):
            shutil.rmtree(leftover)
        return self

    def __exit__(self, *_: object) -> None:
        if self.work.exists():
            self._discard_if_empty()

    def finished(self, task: Task) -> PartInfo | None:
        """The part of `task` if it is there and its file has not changed since; else clears it."""
        if not task.part.exists():
            return None
        info = PartInfo.load(task.part)
        made_of = (info.path, info.split, info.stamp)
        unchanged = made_of == (task.source.name, task.split, task.source.stamp())
        if unchanged and (task.quarantine or not info.rejected):
            return info
        shutil.rmtree(task.part)
        return None

    def _discard_if_empty(self) -> None:
        """Removes the work folder if no finished part has documents: nothing would be lost."""
        if not any(PartInfo.load(part).documents for part in self.parts.glob("?????")):
            shutil.rmtree(self.work)

    def close(self) -> None:
        """Removes the work folder; the data set is finished."""
        shutil.rmtree(self.work)


def is_finished(out: Path) -> bool:
    """Whether `out` holds a finished data set."""
    return (out / DATASET_FILE).is_file()


def check_same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    """Refuses to mix two preparations in one folder.

    Raises:
        DataError: naming the keys that differ.
    """
    differ = [
        f"{key} (there {found.get(key)!r}, now {wanted.get(key)!r})"
        for key in wanted | found
        if found.get(key) != wanted.get(key)
    ]
    if differ:
        raise DataError(
            f"{out} holds a data set of another configuration; what differs: {'; '.join(differ)}. "
            "Choose another out, or remove that folder."
        )
