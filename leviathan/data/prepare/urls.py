"""Corpus files at URLs, through fsspec: `s3://`, `hf://`, `https://`, `file://`, …"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from leviathan.credentials import without_credentials
from leviathan.data.filesystem import open_filesystem, readable_error
from leviathan.data.prepare.local_files import list_local
from leviathan.data.prepare.source import ByteSource, keep_corpus_files
from leviathan.errors import DataError

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
        return _find_local(fs, path, pattern)
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


def _find_local(fs: Any, path: str, pattern: str) -> list[ByteSource]:
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
