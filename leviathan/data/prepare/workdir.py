"""State of a preparation in its output directory: locks, configuration, finished work.

During a preparation, `out/.prep/` contains

    config.json       the configuration; another one is refused
    request.json      the complete configuration and the list of inputs, for `leviathan data merge`
    tokenizer/
    parts/NNNNN/      one tokenized corpus file each
    slice-R-of-N      empty: the slice is finished and waits for the merge
    pack/             finished shards of train and val, and `of.json`, which lists their parts

`dataset.json` is written last; then `.prep` is removed.
"""

import json
import os
import shutil
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leviathan.config.identity import flatten
from leviathan.data.format import COUNTS_FILE, DATASET_FILE, REJECTS_FILE, SLICE_MARK, WORK_FOLDER
from leviathan.data.prepare.readers import TextFolder
from leviathan.data.prepare.tokenize import TokenizedFileInfo, TokenizeTask
from leviathan.data.tokenizer import META_FILE, RANKS_FILE
from leviathan.errors import ConfigError, DataError
from leviathan.files import read_json, write_atomic
from leviathan.locks import lock_file


@dataclass(frozen=True)
class PrepSlice:
    """Every `world`-th input file, from number `rank` on."""

    rank: int
    world: int


def read_slice(environment: MutableMapping[str, str] = os.environ) -> PrepSlice:
    """Reads the slice from the launcher's variables: RANK and WORLD_SIZE, or a Slurm array's.

    RANK and WORLD_SIZE are removed from the environment: slices are not ranks of one run, and each
    prints its own output.

    Raises:
        ConfigError: the variables are missing or inconsistent.
    """
    if "RANK" in environment:
        rank = _number(environment, "RANK")
        world = _number(environment, "WORLD_SIZE")
        names = "RANK, WORLD_SIZE"
        del environment["RANK"], environment["WORLD_SIZE"]
    elif "SLURM_ARRAY_TASK_ID" in environment:
        first = _number(environment, "SLURM_ARRAY_TASK_MIN")
        rank = _number(environment, "SLURM_ARRAY_TASK_ID") - first
        world = _number(environment, "SLURM_ARRAY_TASK_COUNT")
        names = "SLURM_ARRAY_TASK_ID, _MIN, _COUNT"
        if "SLURM_ARRAY_TASK_MAX" in environment:
            last = _number(environment, "SLURM_ARRAY_TASK_MAX")
            if last - first + 1 != world:
                raise ConfigError(
                    "slices.invalid_array",
                    f"executor=rank: the array's tasks {first} to {last} are not {world} "
                    "consecutive numbers. Submit it with --array=0-N, without steps or gaps",
                )
    else:
        raise ConfigError(
            "slices.no_rank",
            "executor=rank: neither RANK and WORLD_SIZE nor SLURM_ARRAY_TASK_ID is set. Set "
            "them, start an array job, or use executor=local",
        )
    if not 0 <= rank < world:
        raise ConfigError(
            "slices.invalid_rank",
            f"executor=rank: slice {rank} of {world} does not exist ({names})",
        )
    return PrepSlice(rank, world)


def _number(environment: MutableMapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise ConfigError("slices.no_rank", f"executor=rank: {name} is not set") from None
    except ValueError:
        found = environment[name]
        raise ConfigError(
            "slices.invalid_rank", f"executor=rank: {name}={found!r} is not a number"
        ) from None


LOCK_FILE = ".prep.lock"
TOKENIZER = "tokenizer"  # directory
SPLITS = ("train", "val")
OWN_FILES = (COUNTS_FILE, DATASET_FILE, REJECTS_FILE, RANKS_FILE, META_FILE)  # next to the splits


@contextmanager
def lock_for_writing(out: Path) -> Iterator[None]:
    """Locks the directory; the system releases the lock when the process exits.

    Raises:
        DataError: another process is writing to it, or it is not writable.
    """
    message = f"another preparation is writing to {out}. Wait for it, or choose another out"
    with _made(out), _locked(out / LOCK_FILE, message):
        yield


@contextmanager
def lock_for_slice(out: Path, rank: int, world: int) -> Iterator[None]:
    """Locks one slice; other slices may be locked at the same time, but not the directory.

    Raises:
        DataError: another process prepares the same slice or the complete dataset.
    """
    dataset_locked = (
        f"{out} is being prepared or merged by another process. Wait for it, or choose another out"
    )
    slice_locked = (
        f"slice {rank} of {world} of {out} is being prepared by another process. Start each "
        "slice once"
    )
    own = out / f".prep.slice-{rank}-of-{world}.lock"
    with (
        _made(out),
        _locked(out / LOCK_FILE, dataset_locked, shared=True),
        _locked(own, slice_locked),
    ):
        yield


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """Creates the directory; removes it afterwards if it is empty."""
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
    """The work directory of one preparation. Create it only while holding one of the locks.

    Leaving its context removes the directory if no finished work would be lost, unless it is
    `shared` with other slices.

    Raises:
        DataError: the directory contains other files, or the work of another configuration.
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
                    f"{out} is not empty (it contains {', '.join(others[:5])}) and was not "
                    "created by `leviathan prep`. Choose another out, or empty it",
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
        """Removes incomplete output of interrupted attempts at these tasks."""
        names = {task.part.name for task in tasks}
        for leftover in self.parts.glob(".*.tmp"):
            if leftover.name.split(".")[1] in names:
                shutil.rmtree(leftover, ignore_errors=True)

    def record(self, request: dict[str, Any]) -> None:
        """Writes the request for a merge.

        Raises:
            DataError: other slices have another list of inputs.
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
                f"the other slices of {self.out} were started with other input files than are "
                f"found now (for example {min(differ)}). Give every slice the same files, or "
                f"remove {self.work}",
            )
        write_atomic(path, json.dumps(request, indent=2).encode())

    def finished(self, task: TokenizeTask) -> TokenizedFileInfo | None:
        """The tokenized file of `task` if its source has not changed since; otherwise clears it."""
        if not task.part.exists():
            return None
        info = TokenizedFileInfo.load(task.part)
        made_of = (info.path, info.split, info.stamp)
        unchanged = made_of == (task.source.name, task.split, task.source.stamp())
        # An earlier version searched fewer locations for subset names: redo files without any.
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
        """Marks a slice as waiting for the merge."""
        mark = self.work / SLICE_MARK.format(rank=rank, world=world)
        if done:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def packing(self, of: Sequence[Any]) -> dict[str, Path]:
        """Directories for the shards of train and val; emptied if their parts have changed."""
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
            if (
                self.out / split
            ).exists():  # killed between moving the splits and writing dataset.json
                shutil.rmtree(inside, ignore_errors=True)
                (self.out / split).rename(inside)
        return folders

    def _discard_if_empty(self) -> None:
        """Removes the work directory if no tokenized file has documents: nothing would be lost."""
        if not any(TokenizedFileInfo.load(part).documents for part in self.parts.glob("?????")):
            shutil.rmtree(self.work)

    def close(self) -> None:
        """Removes the work directory; the dataset is complete."""
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
    """Whether `out` contains a complete dataset."""
    return (out / DATASET_FILE).is_file()


def tidy(out: Path) -> None:
    """Removes leftovers of runs that were killed at their very end, next to a complete dataset."""
    work = out / WORK_FOLDER
    if work.exists() or (out / LOCK_FILE).exists() or _leftovers(out):
        with suppress(DataError), lock_for_writing(out):
            shutil.rmtree(work, ignore_errors=True)
            for leftover in _leftovers(out):
                leftover.unlink()


def _leftovers(out: Path) -> list[Path]:
    """Temporary files of killed runs; call only while no process writes there."""
    return [path for name in OWN_FILES for path in out.glob(f".{name}.*.tmp")]


def check_same(found: dict[str, Any], expected: dict[str, Any], out: Path) -> None:
    """Raises an error if another preparation uses the directory.

    Raises:
        DataError: the keys that differ are named.
    """
    there, here = flatten(found), flatten(expected)
    differ = [
        f"{key} (there {there.get(key)!r}, now {here.get(key)!r})"
        for key in here | there
        if there.get(key) != here.get(key)
    ]
    if differ:
        raise DataError(
            "prep.other_config",
            f"{out} contains a dataset of another configuration. Differences: "
            f"{'; '.join(differ)}. Choose another out, or remove the directory.",
        )
