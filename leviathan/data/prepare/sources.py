"""Sources of a corpus: the files of directories, globs and URLs, in a fixed order."""

import glob
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from typing_extensions import override

from leviathan.config.data import HubConfig, PrepConfig, SourceConfig, ValidationConfig
from leviathan.console import say
from leviathan.credentials import without_credentials
from leviathan.data.filesystem import open_filesystem, readable_error
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
    """Yields a directory and those below it, including links, without cycles."""
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
    """Lists a directory and its real subdirectories; yields links to directories.

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


Split = Literal[
    "train", "val", "hash"
]  # hash: the digest of the text decides, document by document

SUFFIXES = {".jsonl", ".ndjson", ".zst", ".zstd", ".gz", ".parquet"}
TEXT_SUFFIXES = (".txt", ".md")


class Source(ABC):
    """One file or shard of a corpus, read from beginning to end."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in messages and in `dataset.json`; unique within a corpus."""

    @abstractmethod
    def size(self) -> int | None:
        """Bytes as stored (compressed, if it is), or None if unknown."""

    @abstractmethod
    def stamp(self) -> str:
        """A value that changes if the content may have changed; not a hash of the bytes."""

    def place(self, line: int) -> tuple[str, int | None]:
        """The file and line of record `line`; line None: the complete file."""
        return self.name, line


class ByteSource(Source):
    """A source that is one stream of bytes."""

    @abstractmethod
    def open(self) -> IO[bytes]:
        """Opens the bytes for reading; unbuffered if possible."""

    @property
    def base(self) -> str:
        """Its name without directories."""
        return self.name.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of its name, lower case, with the dot."""
        return PurePosixPath(self.base).suffix.lower()


@dataclass(frozen=True)
class FileSource(ByteSource):
    """A local file."""

    path: Path

    @property
    @override
    def name(self) -> str:
        return str(self.path)

    @override
    def size(self) -> int:
        return self.path.stat().st_size

    @override
    def stamp(self) -> str:
        status = self.path.stat()
        return f"{status.st_size} bytes, modified {status.st_mtime_ns}"

    @override
    def open(self) -> IO[bytes]:
        return self.path.open("rb", buffering=0)


def keep_corpus_files(sources: Iterable[ByteSource], pattern: str) -> list[ByteSource]:
    """Omits other files with a message, and sorts the rest by name.

    Text files are read only if there are no other corpus files: next to shards, they document them.

    Raises:
        DataError: no file remains.
    """
    ordered = sorted(sources, key=lambda source: source.name)
    seen = [source for source in ordered if not source.base.startswith(".")]
    kept = [source for source in seen if source.suffix in SUFFIXES]
    kept = kept or [source for source in seen if source.suffix in TEXT_SUFFIXES]
    expected = f"(expected {', '.join(sorted(SUFFIXES))}, or {' and '.join(TEXT_SUFFIXES)} alone)"
    if not kept:
        raise DataError("source.not_found", f"{pattern}: no corpus files found {expected}")
    of_corpus = {source.name for source in kept}
    litter = [printable(source.base) for source in ordered if source.name not in of_corpus]
    if litter:
        more = f" and {len(litter) - 8} more" if len(litter) > 8 else ""
        say(f"{pattern}: ignored {', '.join(litter[:8])}{more} {expected}")
    return kept


_BLOCK = 1 << 23
# The keys under which filesystems report the version of a file.
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "mtime", "LastModified", "last_modified")


def is_url(pattern: str) -> bool:
    """Whether `pattern` is a URL of a filesystem of fsspec."""
    return "://" in pattern


@dataclass(frozen=True)
class UrlSource(ByteSource):
    """A file at a URL, with its size and version when it was listed.

    Attributes:
        location: equal for all spellings of the URL; a path if `is_local`.
    """

    url: str
    length: int | None
    version: str
    location: str
    is_local: bool

    @property
    @override
    def name(self) -> str:
        return without_credentials(self.url)

    @override
    def size(self) -> int | None:
        return self.length

    @override
    def stamp(self) -> str:
        return f"{self.length} bytes, version {self.version}"

    @override
    def open(self) -> IO[bytes]:
        fs, path = open_filesystem(self.url)
        try:
            file = fs.open(path, "rb", block_size=_BLOCK, cache_type="readahead")
        except Exception as error:  # every filesystem raises its own
            raise readable_error(error) from None
        return _SizeCheckedFile(file, self.length)  # pyright: ignore[reportReturnType] - as FileIO is


class _SizeCheckedFile(io.RawIOBase):
    """Reads a remote file; raises an error if it ends early."""

    def __init__(self, file: Any, size: int | None) -> None:
        self._file, self._size, self._done = file, size, 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._file.read(len(buffer))
        except Exception as error:
            raise readable_error(error) from None
        memoryview(buffer)[: len(content)] = content
        self._done += len(content)
        if not content and len(buffer) and self._size is not None and self._done < self._size:
            raise OSError(f"it ended after {self._done:,} of {self._size:,} bytes")
        return len(content)


def find_urls(pattern: str) -> list[ByteSource]:
    """Lists the corpus files at a URL: a file, a directory, or a glob if the server can list it.

    Over http(s), a directory must end with a slash, and `?` is not a wildcard.

    Raises:
        DataError: no file is found, the server is unreachable, or a package is not installed.
    """
    fs, path = open_filesystem(pattern)
    if _is_local(fs):
        return _find_file_url(fs, path, pattern)
    http = pattern.startswith(("http://", "https://"))
    try:
        if any(sign in path for sign in ("*[" if http else "*?[")):
            return keep_corpus_files(_sources(fs, fs.glob(path)), pattern)
        if pattern.endswith("/") or (not http and fs.isdir(path)):
            fs.ls(path)  # raises the errors that `find` ignores
            return keep_corpus_files(_sources(fs, fs.find(path)), pattern)
        return [_source(fs, path, pattern)]
    except FileNotFoundError as error:
        reason = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise DataError(
            "source.not_found", f"no such file or directory: {pattern}{reason}"
        ) from None
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            "url.unreachable", f"{pattern}: cannot be reached ({readable_error(error)})"
        ) from None


def _find_file_url(fs: Any, path: str, pattern: str) -> list[ByteSource]:
    """Lists local files (`file://`) in the same way as paths."""
    if Path(path).is_file():
        return [_source(fs, path, pattern)]
    if (listing := list_local(Path(path))) is None:
        raise DataError("source.not_found", f"no such file or directory: {pattern}")
    listing.warn(pattern)
    return keep_corpus_files(_sources(fs, map(str, listing.files)), pattern)


def _is_local(fs: Any) -> bool:
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def _sources(fs: Any, paths: Any) -> list[ByteSource]:
    return [_source(fs, path, fs.unstrip_protocol(path)) for path in paths if not fs.isdir(path)]


def _source(fs: Any, path: str, url: str) -> UrlSource:
    info = fs.info(path)
    if info.get("type") == "directory":
        raise DataError("source.is_directory", f"{url} is a directory. Append a slash")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "unknown")
    size = info.get("size")
    local = _is_local(fs)
    location = path if local else fs.unstrip_protocol(path)
    return UrlSource(url, None if size is None else int(size), version, location, local)


def find_splits(config: PrepConfig) -> list[tuple[Source, Split]]:
    """Lists the sources of a preparation in order, each with its split.

    Raises:
        DataError: no files are found, or none remains for training.
    """
    held_out = _find(config.validation, "validation.hub")
    kind: Split = "hash" if config.validation.fraction and not held_out else "train"
    training: list[Source] = []
    both: list[str] = []
    for identity, source in _find(config.source, "source.hub").items():
        if identity not in held_out:
            training.append(source)
        elif held_out[identity].name == source.name:
            both.append(source.name)
        else:
            both.append(f"{source.name} (as {held_out[identity].name})")
    if both:
        verb = "is" if len(both) == 1 else "are"
        say(f"{first_names(both)} {verb} held out for validation and not used for training")
    if not training:
        raise DataError(
            "source.all_held_out",
            "every file of source.paths is held out: no file remains for training",
        )
    splits: list[tuple[Source, Split]] = [(source, kind) for source in _grouped(training)]
    return splits + [(source, "val") for source in _grouped(held_out.values())]


def find_inputs(patterns: Sequence[str]) -> list[Source]:
    """Lists the sources that `patterns` match, pattern by pattern, each in name order.

    Directories are searched recursively, including links to directories. Hidden files and files of
    other types in a directory or glob are skipped with a warning; a file given by its name is
    always read. A file that is listed twice, even under different paths, is read once. The text
    files of a directory become one source.

    Raises:
        DataError: a pattern matches no readable file, or a file name is not UTF-8.
    """
    return _grouped(_find_files(patterns).values())


def _find(config: SourceConfig | ValidationConfig, hub_key: str) -> dict[str, Source]:
    """The files or shards of one configuration section, by identity."""
    return dict(_find_files(config.paths)) if config.hub is None else _find_hub(config.hub, hub_key)


def _find_hub(hub: HubConfig, key: str) -> dict[str, Source]:
    from leviathan.data.prepare.hub import find_hub

    # Two revisions of a shard have the same name but different data.
    return {f"{source.name} {source.stamp()}": source for source in find_hub(hub, key)}


def _grouped(sources: Iterable[Source]) -> list[Source]:
    from leviathan.data.prepare.readers import group_texts

    return group_texts(sources)


def _find_files(patterns: Sequence[str]) -> dict[str, ByteSource]:
    """Every file that `patterns` match, once, by identity."""

    files = FileIdentity()
    found: dict[str, ByteSource] = {}
    repeated: list[str] = []
    for pattern in patterns:
        sources = find_urls(pattern) if is_url(pattern) else _find_local(pattern)
        _check_names(sources)
        identities = [_identity(source, files) for source in sources]
        chosen: dict[str, ByteSource] = {}
        for source, identity in zip(sources, identities, strict=True):
            best = chosen.get(identity, source)
            chosen[identity] = min(source, best, key=lambda each: _spelling(each, identity))
        for source, identity in zip(sources, identities, strict=True):
            kept = found.get(identity, chosen[identity])
            if kept is not source:
                same = kept.name == source.name
                repeated.append(source.name if same else f"{source.name} (as {kept.name})")
            elif identity not in found:
                found[identity] = source
    if repeated:
        verb = "is" if len(repeated) == 1 else "are"
        say(f"warning: {first_names(repeated)} {verb} listed twice and read once", style="yellow")
    return found


def _identity(source: ByteSource, files: FileIdentity) -> str:
    """A string that is equal for all spellings of one file."""

    if isinstance(source, FileSource):
        return files.of(source.path)
    assert isinstance(source, UrlSource)
    return files.of(source.location) if source.is_local else source.location


def _spelling(source: ByteSource, identity: str) -> tuple[bool, int, str]:
    """Sort key of spellings: the minimum has no links, is short, and is first in name order."""
    return str(Path(source.name).absolute()) != identity, source.name.count("/"), source.name


def _check_names(sources: Iterable[ByteSource]) -> None:
    """Raises an error for file names that dataset.json cannot record, before any work is done."""
    for source in sources:
        try:
            source.name.encode()
        except UnicodeEncodeError:
            raise DataError(
                "source.name_not_utf8",
                f"{printable(source.name)}: this file name is not UTF-8 (bytes shown as \\x…): "
                "rename the file or its directory",
            ) from None


def _find_local(pattern: str) -> list[ByteSource]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [FileSource(path)]
    if (listing := list_local(path)) is not None:
        listing.warn(pattern)
        return keep_corpus_files(map(FileSource, listing.files), pattern)
    if path.exists():
        raise DataError(
            "source.not_regular",
            f"{pattern} is not a regular file. Give files, directories or globs",
        )
    if path.is_symlink():
        raise DataError("source.broken_link", f"{pattern} is a broken link to {path.readlink()}")
    raise DataError("source.not_found", f"no such file or directory: {pattern} (in {Path.cwd()})")
