"""The state of a preparation in its output folder: writers, configuration, finished work.

While it runs, `out/.prep/` holds

    config.json       what is being made; another configuration is refused
    request.json      the whole configuration and the list of inputs, for `leviathan data merge`
    tokenizer/
    parts/NNNNN/      one finished corpus file each
    slice-R-of-N      empty: that slice is done and waits for the merge
    pack/             finished shards of train and val, and `of.json`: which parts they are made of

`dataset.json` is written last; then `.prep` goes.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from leviathan.data.format import (
    COUNTS_FILE,
    DATASET_FILE,
    REJECTS_FILE,
    SLICE_MARK,
    WORK_FOLDER,
)
from leviathan.data.prepare.text_files import TextFolder
from leviathan.data.prepare.tokenize import TokenizedFileInfo, TokenizeTask
from leviathan.data.tokenizer import META_FILE, RANKS_FILE
from leviathan.errors import DataError
from leviathan.files import read_json, write_atomic
from leviathan.locks import lock_file

LOCK_FILE = ".prep.lock"
TOKENIZER = "tokenizer"  # folder
SPLITS = ("train", "val")
OWN_FILES = (COUNTS_FILE, DATASET_FILE, REJECTS_FILE, RANKS_FILE, META_FILE)  # beside the splits


@contextmanager
def lock_for_writing(out: Path) -> Iterator[None]:
    """Holds the folder's lock; the system frees it when the process ends, however it ends.

    Raises:
        DataError: another process is writing there, or the folder cannot be written.
    """
    message = f"another preparation is writing to {out}: wait for it, or choose another out"
    with _made(out), _locked(out / LOCK_FILE, message):
        yield


@contextmanager
def lock_for_slice(out: Path, rank: int, world: int) -> Iterator[None]:
    """Holds the lock of one slice; others may hold those of other slices, but no one the folder's.

    Raises:
        DataError: somebody makes the same slice, or is at work on the whole.
    """
    whole = f"{out} is being prepared or merged as a whole: wait for it, or choose another out"
    twice = f"slice {rank} of {world} of {out} is being made by another process: start each once"
    own = out / f".prep.slice-{rank}-of-{world}.lock"
    with (
        _made(out),
        _locked(out / LOCK_FILE, whole, shared=True),
        _locked(own, twice),
    ):
        yield


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """The folder is there; afterwards it is gone if nothing has been left in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError("output.not_writable", f"cannot write to {out}: {error.strerror}") from None
    try:
        yield
    finally:
        if out.is_dir() and not any(out.iterdir()):
            out.rmdir()


@contextmanager
def _locked(path: Path, taken: str, shared: bool = False) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(lock_file(path, shared))
        except BlockingIOError:
            raise DataError("prep.locked", taken) from None
        except OSError as error:
            raise DataError(
                "output.not_writable", f"cannot write to {path.parent}: {error.strerror}"
            ) from None
        yield


class WorkDir:
    """The work folder of one preparation. Create it only while holding one of the locks.

    Leaving its context removes the folder if no finished work would be lost; not when it is
    `shared` with other slices.

    Raises:
        DataError: the folder holds something else, or another configuration's work.
    """

    def __init__(self, out: Path, identity: dict[str, Any], shared: bool = False) -> None:
        self.out, self.shared = out, shared
        self.work = out / WORK_FOLDER
        self.parts = self.work / "parts"
        self.tokenizer = self.work / TOKENIZER
        path = self.work / "config.json"
        others = sorted(p.name for p in out.iterdir() if not p.name.startswith(WORK_FOLDER))
        if not path.is_file():
            if others:
                raise DataError(
                    "prep.not_empty",
                    f"{out} is not empty (it holds {', '.join(others[:5])}) and was not begun by "
                    "`leviathan prep`: choose another out, or empty it",
                )
            try:
                self.work.mkdir(exist_ok=True)
                write_atomic(path, json.dumps(identity, indent=2).encode())
            except OSError:
                shutil.rmtree(self.work, ignore_errors=True)
                raise
        check_same(read_work_file(path), identity, out)

    def __enter__(self) -> "WorkDir":
        self.parts.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.work.exists() and not self.shared:
            self._discard_if_empty()

    def clear_leftovers(self, tasks: Sequence[TokenizeTask]) -> None:
        """Removes what killed attempts at these tasks have left half-done."""
        for task in tasks:
            for leftover in task.part.parent.glob(f"{task.part.name}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)

    def record(self, request: dict[str, Any]) -> None:
        """Leaves the request for a merge.

        Raises:
            DataError: other slices were given another list of inputs.
        """
        path = self.work / "request.json"
        if (
            self.shared
            and path.exists()
            and (there := read_work_file(path)["inputs"]) != request["inputs"]
        ):
            differ = {
                name for name, *_ in set(map(tuple, there)) ^ set(map(tuple, request["inputs"]))
            }
            raise DataError(
                "prep.other_sources",
                f"the other slices of {self.out} were begun with other input files than are found "
                f"now (for example {min(differ)}): give every slice the same files, or remove "
                f"{self.work}",
            )
        write_atomic(path, json.dumps(request, indent=2).encode())

    def finished(self, task: TokenizeTask) -> TokenizedFileInfo | None:
        """The part of `task` if it is there and its file has not changed since; else clears it."""
        if not task.part.exists():
            return None
        info = TokenizedFileInfo.load(task.part)
        made_of = (info.path, info.split, info.stamp)
        unchanged = made_of == (task.source.name, task.split, task.source.stamp())
        # An earlier version searched fewer places for subset names: redo parts without any.
        is_current = (
            info.named is not None
            or isinstance(task.source, TextFolder)
            or info.names_subsets(task.reading.default_subset)
        )
        if unchanged and is_current and (task.quarantine or not info.rejected):
            return info
        shutil.rmtree(task.part)
        return None

    def mark_slice(self, rank: int, world: int, done: bool) -> None:
        """Notes for people whether a slice waits for the merge."""
        mark = self.work / SLICE_MARK.format(rank=rank, world=world)
        if done:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def packing(self, of: Sequence[Any]) -> dict[str, Path]:
        """Folders for the shards of train and val; what is in them was packed of the same parts."""
        folder, mark = self.work / "pack", self.work / "pack" / "of.json"
        content = json.dumps(of).encode()
        if not mark.is_file() or mark.read_bytes() != content:
            shutil.rmtree(folder, ignore_errors=True)
            for split in SPLITS:
                shutil.rmtree(self.out / split, ignore_errors=True)
            folder.mkdir()
            write_atomic(mark, content)
        folders = {split: folder / split for split in SPLITS}
        for split, inside in folders.items():
            if (self.out / split).exists():  # killed between moving it out and dataset.json
                shutil.rmtree(inside, ignore_errors=True)
                (self.out / split).rename(inside)
        return folders

    def _discard_if_empty(self) -> None:
        """Removes the work folder if no finished part has documents: nothing would be lost."""
        if not any(TokenizedFileInfo.load(part).documents for part in self.parts.glob("?????")):
            shutil.rmtree(self.work)

    def close(self) -> None:
        """Removes the work folder; the dataset is finished."""
        shutil.rmtree(self.work)
        for leftover in _leftovers(self.out):
            leftover.unlink()


def read_work_file(path: Path) -> dict[str, Any]:
    """Reads a JSON file of the work directory.

    Raises:
        DataError: the file is missing or corrupt.
    """
    return read_json(path, "prep.corrupt", f"Remove {path.parent} and prepare again.")


def is_finished(out: Path) -> bool:
    """Whether `out` holds a finished dataset."""
    return (out / DATASET_FILE).is_file()


def tidy(out: Path) -> None:
    """Removes what runs killed at their very end have left beside a finished dataset."""
    work = out / WORK_FOLDER
    if work.exists() or (out / LOCK_FILE).exists() or _leftovers(out):
        with suppress(DataError), lock_for_writing(out):
            shutil.rmtree(work, ignore_errors=True)
            for leftover in _leftovers(out):
                leftover.unlink()


def _leftovers(out: Path) -> list[Path]:
    """Temporary files of killed runs; only while no one writes there."""
    return [path for name in OWN_FILES for path in out.glob(f".{name}.*.tmp")]


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
            "prep.other_config",
            f"{out} holds a dataset of another configuration; what differs: {'; '.join(differ)}. "
            "Choose another out, or remove that folder.",
        )
