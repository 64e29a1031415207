"""What a file is, by its first bytes, and its unpacked bytes, whatever it is packed with.

Packed bytes are unpacked into pieces of bounded size: not even a file of a few bytes that stand for
gigabytes takes more memory than any other.
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
AGAIN = "download or copy it again"  # all that helps a file that is not whole
_PACKED = 1 << 17  # compressed bytes read at once
_WINDOW_LOG = 31  # `zstd --long=31`; the library refuses windows above 2^27 by itself


def sniff(source: ByteSource) -> Kind:
    """What `source` is, by its first bytes; the suffix only serves to name what it is not.

    Raises:
        DataError: unreadable, or something that people often take for a corpus file.
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
            problem = f"a binary file of no kind we read (it begins with {head[:8]!r})"
        if problem is not None:
            raise DataError("source.corrupt", f"{source.name}: {problem}")
    return kind or "jsonl"


def packing(head: bytes) -> Kind | None:
    """The packing that `head` is the beginning of, if it is one."""
    if not head:
        return "empty"
    # A zstd file may begin with a skippable frame.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (0x50 <= head[0] <= 0x5F and head[1:4] == b"*M\x18"):
        return "zst"
    if head.startswith(b"\x1f\x8b"):
        return "gz"
    return "parquet" if head.startswith(b"PAR1") else None


def not_text(head: bytes) -> str | None:
    """What `head` begins if it is none of our texts, in words; None if it may be one."""
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
    """Turns what reading `source` raises into a DataError that names it."""
    try:
        yield
    except gzip.BadGzipFile as error:
        raise DataError(
            "source.corrupt", f"{source.name}: damaged gzip file ({error}); {AGAIN}"
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
            "source.corrupt", f"{source.name}: damaged gzip file ({error}); {AGAIN}"
        ) from None


def unpack(
    source: ByteSource,
    kind: Kind,
    file: IO[bytes],
    on_bytes: Callable[[int], Any] | None = None,
    digest: Any = None,
) -> io.BufferedReader:
    """The unpacked bytes of `file`; what is read of it is counted and hashed along the way."""
    tap = _HashingReader(file, on_bytes, digest)
    if kind == "zst":
        return io.BufferedReader(_ZstdFrames(source.name, tap), BUFFER)
    if kind == "gz":
        packed = io.BufferedReader(tap, BUFFER)
        return io.BufferedReader(gzip.GzipFile(fileobj=packed), BUFFER)  # pyright: ignore
    return io.BufferedReader(tap, BUFFER)


class _HashingReader(io.RawIOBase):
    """Passes the bytes of a raw file on, counting and hashing them."""

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
    """Unpacks every frame of a zstd file and notices when the last one is cut off."""

    def __init__(self, name: str, packed: io.RawIOBase) -> None:
        from backports import zstd

        self._name, self._packed, self._error = name, packed, zstd.ZstdError
        options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}
        self._new_frame = lambda: zstd.ZstdDecompressor(options=options)
        self._frame: Any = None
        self._rest = b""  # packed bytes of the next frame

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
                        f"{self._name}: truncated: the last zstd frame does not end; {AGAIN}",
                    )
                if not packed:
                    return 0
                self._frame = self._frame or self._new_frame()
            else:
                packed = b""  # it holds more of what it was given than it could hand out
            try:
                unpacked = self._frame.decompress(packed, len(buffer))
            except self._error as error:
                raise DataError(
                    "source.corrupt", f"{self._name}: damaged zstd file ({error}); {AGAIN}"
                ) from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
            if unpacked:
                memoryview(buffer)[: len(unpacked)] = unpacked
                return len(unpacked)
