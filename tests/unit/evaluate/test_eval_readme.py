"""The commands at the top of eval/README.md, run as they stand there."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from seven import write_items

from leviathan.parallel.ports import free_port

REPOSITORY = Path(__file__).parents[3]
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--master-port"),
    "deepspeed": ("deepspeed.launcher.runner", "--master_port"),
}


def commands() -> list[list[str]]:
    """Of every code block before the papers' evaluations."""
    text = (REPOSITORY / "eval" / "README.md").read_text().split("\n## ")[0]
    blocks = "".join(text.split("```")[1::2])
    return [shlex.split(line, comments=True) for line in blocks.splitlines() if line.strip()]


@pytest.mark.heavy
def test_commands_of_the_readme(
    make_run: Callable[..., Path], wide_run: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    run, items = make_run(tiny_dataset), tmp_path / "items"
    items.mkdir()
    write_items(items)
    # Ours are small: two ranks for eight, a stride that their context has; tasks need a wider one.
    names = {"DATA": tiny_dataset, "DIR": items, "128": 16, "8": 2}
    ran = 0
    for words in commands():
        names["CKPT"] = wide_run if "eval" in words else run
        if "eval" in words and "--task-data" not in words:
            continue  # from the Hub
        words = [word for word in words if word not in ("[CKPT", "…]")]
        if words[0] in LAUNCHERS:
            module, port = LAUNCHERS[words[0]]
            program = ["-m", module, port, str(free_port()), *words[1:]]
            if words[0] == "deepspeed":
                program[4:4] = ["--num_accelerators", "2"]
        else:
            program = ["-m", "leviathan", *words[1:]]
        done = subprocess.run(
            [sys.executable, *(str(names.get(word, word)) for word in program)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        ran += 1
    assert ran == 7
