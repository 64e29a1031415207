"""The README's commands are the Makefile's and the program's."""

import re
import shlex
from pathlib import Path

from typer.main import get_command

from leviathan.cli import app

ROOT = Path(__file__).parents[2]
COMMANDS = [
    line.strip()
    for line in (ROOT / "README.md").read_text().splitlines()
    if line.startswith("    ") and line.strip()
]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [line.split()[1] for line in COMMANDS if line.startswith("make ")]
    assert {"quickstart", "test"} <= set(named) <= targets


def test_every_command_parses_and_names_files_that_exist():
    program = get_command(app)
    for line in COMMANDS:
        words = shlex.split(line)
        for word in words:
            if word.startswith(("configs/", "launch/", "benchmarks/")):
                assert (ROOT / word).is_file(), line
        if words[0] == "leviathan":
            sub = program.commands[words[1]]  # type: ignore[attr-defined]
            name, rest = words[1], words[2:]
            if hasattr(sub, "commands"):
                sub, name, rest = sub.commands[words[2]], words[2], words[3:]
            sub.make_context(name, rest)  # raises on an unknown option or a missing argument
        else:
            assert words[0] in ("make", "deepspeed", ".venv/bin/python"), line
