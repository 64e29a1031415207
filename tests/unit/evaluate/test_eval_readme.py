"""The commands of eval/README.md, run as documented."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documentation import runnable
from seven import write_items

from leviathan.parallel.launch_env import free_port

REPOSITORY = Path(__file__).parents[3]
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--master-port"),
    "deepspeed": ("deepspeed.launcher.runner", "--master_port"),
}


@pytest.mark.heavy
def test_commands_of_the_readme(
    make_run: Callable[..., Path], wide_run: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    run, items = make_run(tiny_dataset), tmp_path / "items"
    items.mkdir()
    write_items(items)
    # Ours are small: two ranks for eight, a stride that their context has; tasks need a wider one.
    names = {"DATA": tiny_dataset, "DIR": items, "128": 16, "8": 2, "runs/a": run}
    ran = 0
    for words in map(shlex.split, runnable("eval/README.md")):
        names["CKPT"] = wide_run if "eval" in words else run
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
    assert ran == 8
