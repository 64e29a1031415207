"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `content` beside `path`, flushes it to the disk and renames it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
