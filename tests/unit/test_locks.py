"""File locks between real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from leviathan.locks import is_locked, lock_file

HOLDER = """
import sys
from pathlib import Path
from leviathan.locks import lock_file
with lock_file(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Starts processes that hold a lock until they are stopped."""
    started = []

    def start(kind: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock"), kind]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_an_exclusive_lock_excludes_others_until_its_process_dies(tmp_path, holder) -> None:
    path = tmp_path / "lock"
    process = holder("exclusive")
    assert is_locked(path)
    for shared in (True, False):
        with pytest.raises(BlockingIOError), lock_file(path, shared):
            pass
    process.kill()
    process.wait()
    assert not is_locked(path)
    with lock_file(path):
        assert path.exists()
    assert not path.exists()


def test_the_last_holder_of_a_shared_lock_removes_the_file(tmp_path, holder) -> None:
    path = tmp_path / "lock"
    first, second = holder("shared"), holder("shared")
    with pytest.raises(BlockingIOError), lock_file(path):
        pass
    first.communicate("")
    assert path.exists()
    second.communicate("")
    assert not path.exists()
