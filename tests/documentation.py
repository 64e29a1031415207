"""The commands of the documentation, and which test runs each.

In every page, indented blocks and code fences without a language hold commands and nothing else,
one a line; anything else is fenced with its language (`text`, `yaml`, `json`, `python`, `diff`). So
a command that is added is found here, and `tests/unit/test_every_command.py` asks who runs it.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from leviathan.parallel.launch_env import free_port

ROOT = Path(__file__).parents[1]
PATIENCE_S = 400
# benchmarks/RESULTS.md holds output, and names the command of each table in words.
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "data_prep/README.md",
    "eval/README.md",
    "launch/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]

# Overrides of configs/run/quickstart.yaml for a run that takes seconds, and the size of its data.
TINY_CORPUS_BYTES, TINY_VOCAB_SIZE = 400_000, 512
TINY_RUN = (
    *("model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.vocab_size=513"),
    *("model.padded_vocab_size=576", "model.embedding.d_seed=8", "train.log_every=1"),
    *("train.eval_every=6", "optim.warmup_steps=2", "checkpoint.every=6"),
)

# Page → the test that runs every command of it but those in ONLY_PARSED.
RUN_BY = {
    "README.md": "tests/e2e/test_readme_runs.py",
    "data_prep/README.md": "tests/e2e/test_data_prep.py",
    "docs/checkpoints.md": "tests/distributed/test_docs.py",
    "docs/embedding_kind.md": "tests/distributed/test_embedding_kind_docs.py",
    "docs/operations.md": "tests/distributed/test_operations.py",
    "docs/experiments.md": "tests/e2e/test_readme_runs.py",
    "docs/tutorial.md": "tests/e2e/test_tutorial.py",
    "eval/README.md": "tests/unit/evaluate/test_eval_readme.py",
    "launch/README.md": "tests/distributed/test_launch_docs.py",
}

_QUICKSTART = "minutes long; tests/e2e/test_quickstart.py runs it in small"
_MAKE = "this very test suite, or an installation"
_HUB = "fetches from the Hugging Face Hub"
_EXPERIMENT = "minutes to days; tests/unit/experiments/test_execute.py runs one in small"
_SLURM = "there is no Slurm; tests/distributed/test_slurm.py runs the script that it submits"
_HOSTS = "two machines; tests/distributed/test_launch_docs.py runs the same on two"
ONLY_PARSED = {
    "make quickstart": _QUICKSTART,
    "make quickstart SHARDS='corpus/*.jsonl.zst' OUT=mine": _QUICKSTART,
    "make test": _MAKE,
    "make check": _MAKE,
    "make venv": _MAKE,
    "python -m pytest tests/unit/config": _MAKE,
    "make docs": "tests/unit/test_every_command.py and config/test_reference.py hold its output",
    "leviathan launch configs/run/pile_400m.yaml --hostfile hostfile": _HOSTS,
    "leviathan eval runs/400m-leviathan --tasks hellaswag,piqa,lambada_openai,wikitext": _HUB,
    "leviathan experiment run configs/experiments/ablation_small.yaml": _EXPERIMENT,
    "leviathan experiment run configs/experiments/fairness_init_small.yaml": _EXPERIMENT,
    "leviathan experiment run configs/experiments/fairness_init.yaml": _EXPERIMENT,
    "leviathan experiment run configs/experiments/fairness_lr_small.yaml": _EXPERIMENT,
    "leviathan experiment run configs/experiments/fairness_lr.yaml": _EXPERIMENT,
    "leviathan launch run.yaml --launcher slurm --nodes 2 --ranks 8": _SLURM,
    "leviathan eval CKPT --tasks lambada_openai": _HUB,
    "lm_eval --model hf --model_args pretrained=exported --tasks hellaswag,arc_easy,arc_challenge,"
    "piqa,winogrande,lambada_openai": _HUB,
    "lm_eval --model hf --model_args pretrained=exported,add_bos_token=False "
    "--tasks wikitext": _HUB,
    "leviathan prep configs/data/pile.yaml "
    "'source.paths=[hf://datasets/monology/pile-uncopyrighted/train/*.zst]' out=data/pile": _HUB,
    "leviathan prep configs/data/pile.yaml 'source.paths=[]' "
    "source.hub.id=monology/pile-uncopyrighted out=data/pile": _HUB,
    "leviathan train configs/run/pile_400m.yaml data.remote=s3://bucket/pile "
    "data.path=/scratch/pile data.cache_limit=200GB": "a bucket; tests/unit/data/test_remote.py",
}


def commands(page: str) -> list[str]:
    """The commands of a page, in order, without comments."""
    return commands_in((ROOT / page).read_text())


def commands_in(text: str) -> list[str]:
    """The commands of Markdown text."""
    found, fence, blank = [], None, True
    for line in text.splitlines():
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
            blank = True
            continue
        indented = fence is None and line.startswith("    ") and (blank is True)
        if (fence == "" and line.strip()) or indented:
            found.append(_without_comment(line.strip()))
        blank = indented or not line.strip()
    return [line for line in found if line]


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)# .*$", "", line).strip()


def runnable(page: str) -> list[str]:
    """The commands of a page that its test must run."""
    return [line for line in commands(page) if line not in ONLY_PARSED]


def programs(folder: Path, deepspeed: str = "--num_accelerators 2") -> None:
    """Puts the programs that pages call into `folder`/bin: those of this Python."""
    python = shlex.quote(sys.executable)
    launcher = f"{python} -m deepspeed.launcher.runner --master_port {free_port()}"
    scripts = {
        "python": f'exec {python} "$@"',
        "leviathan": f'exec {python} -m leviathan "$@"',
        "torchrun": f'exec {python} -m torch.distributed.run --master-port {free_port()} "$@"',
        "deepspeed": f'[[ "$*" == *--num_accelerators* ]] || set -- {deepspeed} "$@"\n'
        f'exec {launcher} "$@"',
    }
    for name, content in scripts.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{content}\n")
        path.chmod(0o755)


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command as started by a shell in `folder`, with its `programs`."""
    launch = "leviathan launch "  # its port is fixed, so that all hosts agree
    return subprocess.Popen(
        ["bash", "-c", command.replace(launch, f"{launch}--port {free_port()} ")],
        cwd=folder,
        env=os.environ
        | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(command: str, folder: Path) -> str:
    """Runs a command to its end, which must be good; its standard output."""
    process = start(command, folder)
    try:
        out, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{command}\n{out[-2000:]}\n{errors[-4000:]}"
    return out


def words(command: str) -> list[str]:
    """A command's words, without the variables set before it."""
    found = shlex.split(command)
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        del found[0]
    return found
