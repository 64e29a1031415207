"""`--help` and `params` import none of the libraries that take seconds to import."""

import subprocess
import sys

import pytest
from documentation import ROOT

HEAVY = {"torch", "sympy", "transformers", "deepspeed", "scipy", "pyarrow", "matplotlib"}
PROGRAM = """
import sys
from leviathan.cli import main
try:
    main()
except SystemExit as stopped:
    assert not stopped.code, stopped.code
print("imported:", *{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["params", "configs/model/400m.yaml"],
        ["params", "configs/run/pile_1.2b.yaml", "--world-size", "64"],
    ],
)
def test_no_heavy_import(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split()[1:])
    assert "leviathan" in imported
    assert not imported & HEAVY
