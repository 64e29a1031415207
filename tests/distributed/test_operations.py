"""docs/operations.md: its commands work, and its quotations match the output."""

import ast
import re
import shutil
from functools import cache

import pytest
import yaml
from documentation import ROOT, programs, run, runnable

PAGE = "docs/operations.md"
QUOTED = [
    line
    for block in re.findall(r"^```text\n(.*?)^```", (ROOT / PAGE).read_text(), re.M | re.S)
    for line in block.splitlines()
]
SOURCES = ("leviathan", "launch", "data_prep")


@cache
def said_by_the_program() -> str:
    """All texts in the source, with `…` for inserted values."""
    texts = []
    for path in (file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(_filled(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\0".join(texts)


def _filled(node: ast.JoinedStr) -> str:
    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "".join(map(str, parts))


def test_messages_are_quoted_as_they_are():
    assert len(QUOTED) > 20
    everything = said_by_the_program()
    for line in QUOTED:
        for part in re.split(r"…|(?<=\w)\. ", line):  # two texts of the source are a dot apart
            words = part.strip(" :;.,()")
            assert len(words) < 4 or words in everything, f"{words!r} of {line!r}"


@pytest.mark.heavy
def test_every_command_works(run_file, tiny_dataset, tmp_path):
    small = yaml.safe_load(run_file.read_text())
    small["train"] |= {"steps": 4, "eval_every": 0}
    small |= {"run_dir": "run", "data": {"path": "data"}, "engine": {"kind": "fsdp2"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small))
    shutil.copytree(tiny_dataset, tmp_path / "data")
    programs(tmp_path)
    run("leviathan train run.yaml", tmp_path)
    for line in runnable(PAGE):
        assert run(line, tmp_path).strip() or "train" in line, line
    assert (tmp_path / "second/checkpoints/step-00000004").is_dir()
