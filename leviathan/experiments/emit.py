"""Writes files for a cluster: a configuration and a script per run, and a Slurm array job."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leviathan.config.load import dump_config
from leviathan.experiments.expand import Experiment
from leviathan.experiments.plan import plan_experiment
from leviathan.files import check_writable_dir, write_atomic
from leviathan.launch.commands import train_script

_SBATCH = """#!/bin/bash
# {title}
# One array task per run. A preempted task saves a checkpoint and resumes when it is requeued:
#   sbatch {array}
# Set the partition, time and resources of one task; runs.txt lists the runs.
#SBATCH --job-name={name}
#SBATCH --array=1-{count}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices}
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --output={name}-%A-%a.log
set -euo pipefail

folder={folder}
script=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" "$folder/runs.txt")
bash "$folder/$script" &
trap 'kill -USR1 -- $!; wait $!' USR1
wait $!
"""

_SCRIPT = """#!/bin/bash
# {name}: {steps} steps of {tokens} tokens, {parameters} parameters
set -euo pipefail
exec {command}
"""


def command_of(launch: str, config: Path) -> list[str]:
    """The command that trains a configuration, directly or with a launcher."""
    if not launch:
        return ["python", "-m", "leviathan", "train", str(config)]
    return [*shlex.split(launch), train_script(), str(config)]


def emit_experiment(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Writes the scripts of an experiment into a directory; trains nothing.

    Returns:
        The plan, with the files under "files".

    Raises:
        DataError: the directory cannot be written.
    """
    check_writable_dir(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_experiment(experiment)
    scripts = []
    for number, (run, planned) in enumerate(
        zip(experiment.runs, plan["runs"], strict=True), start=1
    ):
        name = f"{number:03d}-{_plain(run.name)}"
        config = folder / f"{name}.yaml"
        write_atomic(config, dump_config(run.config).encode())
        step = run.config.train.global_batch_size * run.config.model.seq_len
        script = _SCRIPT.format(
            name=_one_line(run.name),
            steps=f"{planned['steps']:,}",
            tokens=f"{step:,}",
            parameters=f"{planned['parameters']['total']:,}",
            command=shlex.join(command_of(experiment.config.launch, config)),
        )
        scripts.append(f"{name}.sh")
        _executable(folder / scripts[-1], script)
    _executable(folder / "array.sbatch", _array(experiment, folder, scripts))
    write_atomic(folder / "runs.txt", ("\n".join(scripts) + "\n").encode())
    plan["files"] = {"array": str(folder / "array.sbatch"), "scripts": scripts}
    write_atomic(folder / "plan.json", json.dumps(plan, indent=1, ensure_ascii=False).encode())
    return plan


def _array(experiment: Experiment, folder: Path, scripts: Sequence[str]) -> str:
    return _SBATCH.format(
        title=_one_line(experiment.config.title),
        name=_plain(experiment.path.stem),
        array=_one_line(shlex.quote(str(folder / "array.sbatch"))),
        folder=shlex.quote(str(folder)),
        count=len(scripts),
        devices=experiment.config.machine.devices,
    )


def _plain(name: str) -> str:
    """A name that is safe in shells, in Slurm and in lists of file names."""
    return re.sub(r"[^\w.=+-]", "-", name)


def _one_line(text: str) -> str:
    """Text that stays within one comment line of a script."""
    return " ".join(text.split())


def _executable(path: Path, text: str) -> None:
    write_atomic(path, text.encode())
    mode = path.stat().st_mode
    path.chmod(mode | (mode & 0o444) >> 2)  # readable by those who may read the directory
