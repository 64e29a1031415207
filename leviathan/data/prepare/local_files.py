"""Local files in a directory or of a glob pattern, and whether two paths refer to the same file.

Symbolic links to directories are followed, each directory once. Skipped entries (broken links,
devices) are collected for the caller to report.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leviathan.console import say
from leviathan.errors import DataError

_NAMED = 5  # maximum number of files named in one message


@dataclass
class Listing:
    """The regular files that a pattern matches, in no particular order.

    Attributes:
        files: the regular files.
        left_out: entries that are neither a file nor a directory, each with the reason.
    """

    files: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def skip(self, path: Path) -> None:
        """Records an entry that cannot be read, with the reason."""
        reason = "not a regular file"
        if path.is_symlink():
            reason = f"a broken link to {printable(str(path.readlink()))}"
        self.skipped.append(f"{printable(str(path))} ({reason})")

    def warn(self, pattern: str) -> None:
        """Prints a warning about the entries that were omitted, if any."""
        if self.skipped:
            say(f"warning: {pattern}: omitted {first_names(self.skipped)}", style="yellow")


def list_local(path: Path) -> Listing | None:
    """Lists the files below a directory or of a glob pattern; None for anything else.

    Raises:
        DataError: a directory cannot be read.
    """
    if path.is_dir():
        return _list_folder(path)
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        return None
    listing = Listing()
    for hit in map(Path, dict.fromkeys(_glob(path))):
        if hit.is_file():
            listing.files.append(hit)
        elif not hit.is_dir():
            listing.skip(hit)
    return listing


def _glob(pattern: Path) -> Iterator[str]:
    """Like `glob.glob(recursive=True)`, but terminates if links form a cycle."""
    if "**" not in pattern.parts:
        yield from glob.glob(str(pattern))
        return
    place = pattern.parts.index("**")
    before, after = Path(*pattern.parts[:place]), pattern.parts[place + 1 :] or ("*",)
    for top in glob.glob(str(before)):
        for folder in _folders_below(Path(top), ()):
            yield from _glob(Path(glob.escape(str(folder)), *after))


def _folders_below(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Yields a directory and the directories below it, including links, but no directory inside
    itself."""
    try:
        status = folder.stat()
        if not folder.is_dir() or (status.st_dev, status.st_ino) in above:
            return
        names = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from None
    yield folder
    for name in names:
        if (folder / name).is_dir():
            yield from _folders_below(folder / name, (*above, (status.st_dev, status.st_ino)))


def _unreadable(folder: Path, error: OSError) -> DataError:
    return DataError(
        "source.unreadable",
        f"{printable(str(folder))}: this directory cannot be read ({error.strerror}). Make it "
        "readable, or give the paths of the files to read",
    )


def _list_folder(folder: Path) -> Listing:
    """Lists real directories before linked ones, so that files get their real path if possible."""
    listing, seen, links = Listing(), set[tuple[int, int]](), [folder]
    while links:
        pending, links = sorted(links), []
        for top in pending:
            links += _walk(top, listing, seen)
    return listing


def _walk(top: Path, listing: Listing, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Lists a directory and the real directories in it; yields the links to directories that it
    finds.

    Directories are identified by device and inode, so cycles of links end.
    """
    folders, links = [top], list[Path]()
    while folders:
        folder = folders.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = list(os.scandir(folder))  # entries have their type without a stat call
        except OSError as error:
            raise _unreadable(folder, error) from None
        for entry in entries:
            try:
                is_file, is_folder = entry.is_file(), entry.is_dir()
            except OSError:  # a link to itself, or into an unreadable directory
                is_file = is_folder = False
            if is_file:
                listing.files.append(Path(entry.path))
            elif not is_folder:
                listing.skip(Path(entry.path))
            elif not entry.name.startswith("."):
                (links if entry.is_symlink() else folders).append(Path(entry.path))
        yield from links
        links.clear()


class FileIdentity:
    """The resolved path of a file, equal for all spellings of its path."""

    def __init__(self) -> None:
        self._folders: dict[Path, Path] = {}  # resolving the directory of every file is slow

    def of(self, path: Path | str) -> str:
        """The resolved path."""
        path = Path(path)
        if path.name in ("", "..") or path.is_symlink():
            return str(path.resolve())
        if path.parent not in self._folders:
            self._folders[path.parent] = path.parent.resolve()
        return str(self._folders[path.parent] / path.name)


def first_names(names: Sequence[str]) -> str:
    """The first few names, and the number of others."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def printable(name: str) -> str:
    """A file name in which bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
