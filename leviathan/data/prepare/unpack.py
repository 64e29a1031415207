"""Detects the format of a file by its first bytes, and decompresses it.

Compressed bytes are decompressed into blocks of bounded size, so that a file of a few bytes that
decompresses to gigabytes needs no more memory than any other.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal

from leviathan.data.prepare.source import ByteSource
from leviathan.errors import DataError

Kind = Literal["jsonl", "zst", "gz", "parquet", "empty"]

BOM = b"\xef\xbb\xbf"
BUFFER = 1 << 20
AGAIN = "download or copy it again"  # the remedy for incomplete files
_PACKED = 1 << 17  # compressed bytes read at once
_WINDOW_LOG = 31  # `zstd --long=31`; by default, the library rejects windows above 2^27


def sniff(source: ByteSource) -> Kind:
    """Detects the format of `source` by its first bytes; the suffix is only used in messages.

    Raises:
        DataError: it is unreadable, or a format that is often confused with one.
    """
    with named(source), source.open() as file:
        head = file.read(512)
    kind = packing(head)
    if kind is None:
        problem = not_text(head)
        start = head.removeprefix(BOM).lstrip()
        packed = source.suffix in (".zst", ".zstd", ".gz", ".parquet")
        if problem is None and packed and not start.startswith(b"{"):
            problem = f"not a {source.suffix[1:]} file (it begins with {head[:8]!r})"
        if problem is None and b"\0" in head:
            problem = f"a binary file of an unsupported format (it begins with {head[:8]!r})"
        if problem is not None:
            raise DataError("source.corrupt", f"{source.name}: {problem}")
    return kind or "jsonl"


def packing(head: bytes) -> Kind | None:
    """The compression of a file that begins with `head`, if known."""
    if not head:
        return "empty"
    # A zstd file may begin with a skippable frame.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (0x50 <= head[0] <= 0x5F and head[1:4] == b"*M\x18"):
        return "zst"
    if head.startswith(b"\x1f\x8b"):
        return "gz"
    return "parquet" if head.startswith(b"PAR1") else None


def not_text(head: bytes) -> str | None:
    """Names the format of a file that begins with `head` if it cannot be a corpus file; else
    None."""
    start = head.removeprefix(BOM).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data: run `git lfs pull`"
    if start[:15].lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page, not the data: the download went wrong"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text; a corpus file must be UTF-8"
    return None


@contextmanager
def named(source: ByteSource) -> Iterator[None]:
    """Converts errors of reading `source` to a DataError that names it."""
    try:
        yield
    except gzip.BadGzipFile as error:
        raise DataError(
            "source.corrupt", f"{source.name}: corrupt gzip file ({error}); {AGAIN}"
        ) from None
    except OSError as error:
        raise DataError(
            "source.unreadable", f"{source.name}: cannot be read ({error.strerror or error})"
        ) from None
    except EOFError:
        raise DataError(
            "source.truncated",
            f"{source.name}: truncated gzip file: it ends in the middle of a stream; {AGAIN}",
        ) from None
    except zlib.error as error:
        raise DataError(
            "source.corrupt", f"{source.name}: corrupt gzip file ({error}); {AGAIN}"
        ) from None


def unpack(
    source: ByteSource,
    kind: Kind,
    file: IO[bytes],
    on_bytes: Callable[[int], Any] | None = None,
    digest: Any = None,
) -> io.BufferedReader:
    """Yields the decompressed bytes of `file`; counts and hashes the compressed ones."""
    tap = _HashingReader(file, on_bytes, digest)
    if kind == "zst":
        return io.BufferedReader(_ZstdFrames(source.name, tap), BUFFER)
    if kind == "gz":
        packed = io.BufferedReader(tap, BUFFER)
        return io.BufferedReader(gzip.GzipFile(fileobj=packed), BUFFER)  # pyright: ignore
    return io.BufferedReader(tap, BUFFER)


class _HashingReader(io.RawIOBase):
    """Yields the bytes of an uncompressed file; counts and hashes them."""

    def __init__(self, raw: IO[bytes], on_bytes: Callable[[int], Any] | None, digest: Any) -> None:
        self._raw, self._on_bytes, self._digest = raw, on_bytes, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0  # pyright: ignore[reportAttributeAccessIssue]
        if self._digest is not None:
            self._digest.update(memoryview(buffer)[:count])
        if self._on_bytes is not None and count:
            self._on_bytes(count)
        return count


class _ZstdFrames(io.RawIOBase):
    """Decompresses every frame of a zstd file; detects a truncated last frame."""

    def __init__(self, name: str, packed: io.RawIOBase) -> None:
        from backports import zstd

        self._name, self._packed, self._error = name, packed, zstd.ZstdError
        options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}
        self._new_frame = lambda: zstd.ZstdDecompressor(options=options)
        self._frame: Any = None
        self._rest = b""  # compressed bytes of the next frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._frame is None or self._frame.needs_input:
                packed = self._rest or self._packed.read(_PACKED) or b""
                self._rest = b""
                if not packed and self._frame is not None:
                    raise DataError(
                        "source.truncated",
                        f"{self._name}: truncated: the last zstd frame is incomplete; {AGAIN}",
                    )
                if not packed:
                    return 0
                self._frame = self._frame or self._new_frame()
            else:
                packed = b""  # the decompressor still has output to return
            try:
                unpacked = self._frame.decompress(packed, len(buffer))
            except self._error as error:
                raise DataError(
                    "source.corrupt", f"{self._name}: corrupt zstd file ({error}); {AGAIN}"
                ) from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
            if unpacked:
                memoryview(buffer)[: len(unpacked)] = unpacked
                return len(unpacked)
