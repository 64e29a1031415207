"""The run directory: its lock, the run that it belongs to, and the point to resume from."""

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leviathan import __version__
from leviathan.checkpoint.layout import CONFIG, RUN, clean_up, read_state, step_of, write_json
from leviathan.checkpoint.store import latest_valid, read_run_config
from leviathan.config.identity import changed_keys, flatten
from leviathan.config.load import dump_config
from leviathan.config.run import ModelConfig, OptimConfig, RunConfig
from leviathan.data.format import DatasetInfo
from leviathan.errors import CheckpointError, ConfigError
from leviathan.estimate.params import count_params
from leviathan.files import write_atomic
from leviathan.locks import lock_file
from leviathan.model.transformer import meta_model
from leviathan.optim import describe_groups
from leviathan.parallel.launch_env import host_name
from leviathan.parallel.mesh import Mesh
from leviathan.train.metrics_log import METRICS, reported_write_errors

LOCK = ".lock"


@dataclass(frozen=True)
class ResumePoint:
    """The step from which a run starts or resumes."""

    step: int = 0  # finished steps
    tokens: int = 0  # target tokens trained on so far
    skipped: int = 0
    checkpoint: Path | None = None
    # The run's id in experiment trackers; kept over restarts. Only rank 0's value is used.
    run_id: str = field(default="", compare=False)


@contextmanager
def lock_run_dir(run_dir: Path, mesh: Mesh) -> Iterator[None]:
    """Locks the run directory for this run, and removes it again if nothing was written.

    Raises:
        ConfigError: another process trains in the directory, or it cannot be created.
    """
    with ExitStack() as held:
        with mesh.sync_errors():
            if mesh.rank == 0:
                if not run_dir.exists():
                    held.callback(_remove_if_empty, run_dir)
                try:
                    run_dir.mkdir(parents=True, exist_ok=True)
                    held.enter_context(lock_file(run_dir / LOCK))
                except BlockingIOError:
                    raise ConfigError(
                        "run_dir.locked",
                        f"run_dir={run_dir}: another process is training in this directory (see "
                        "run.json). Wait for it, stop it, or choose another run_dir.",
                    ) from None
                except OSError as error:
                    raise ConfigError(
                        "run_dir.not_writable", f"run_dir={run_dir}: cannot be used ({error})"
                    ) from None
        yield


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def find_resume_point(config: RunConfig, info: DatasetInfo, mesh: Mesh) -> ResumePoint:
    """The latest valid checkpoint of this run, or its beginning. Collective.

    Raises:
        ConfigError: the directory contains a run with another configuration.
        CheckpointError: all checkpoints are corrupt, or the dataset has changed.
    """
    checkpoint = latest_valid(config.run_dir, mesh)
    with mesh.sync_errors():
        start = (
            resume_point_of(config, info, checkpoint) if checkpoint else new_resume_point(config)
        )
    with mesh.sync_errors():
        if mesh.rank == 0:  # only here, so that a rejected run leaves it unchanged
            clean_up(config.run_dir, step_of(checkpoint) if checkpoint else 0)
    return start


def new_resume_point(config: RunConfig) -> ResumePoint:
    """Step 0, unless another run has logged metrics in the directory.

    Raises:
        ConfigError: the directory contains a run with another configuration.
    """
    log = config.run_dir / METRICS
    if log.is_file() and log.stat().st_size:
        _same_run(config, read_run_config(config.run_dir), config.run_dir / CONFIG)
        return ResumePoint(run_id=_previous_id(config.run_dir) or _new_id())
    return ResumePoint(run_id=_new_id())


def _new_id() -> str:
    return secrets.token_hex(4)


def _previous_id(run_dir: Path) -> str | None:
    try:
        found = json.loads((run_dir / RUN).read_text()).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def resume_point_of(config: RunConfig, info: DatasetInfo, checkpoint: Path) -> ResumePoint:
    """The start of a run from a checkpoint of this configuration and dataset.

    Raises:
        ConfigError: the checkpoint has another configuration.
        CheckpointError: it was trained on another dataset, or its state is corrupt.
    """
    _same_run(config, read_run_config(checkpoint), checkpoint)
    state = read_state(checkpoint, step=int, tokens=int, skipped=int, data_fingerprint=str)
    if state["data_fingerprint"] != info.fingerprint:
        raise CheckpointError(
            "run_dir.other_dataset",
            f"{checkpoint}: trained on another dataset (fingerprint "
            f"{state['data_fingerprint'][:12]}…) than {config.data.path} "
            f"({info.fingerprint[:12]}…). Set data.path to the original dataset, or choose another "
            "run_dir",
        )
    run_id = state.get("tracker_id") or _previous_id(config.run_dir) or _new_id()
    return ResumePoint(state["step"], state["tokens"], state["skipped"], checkpoint, run_id)


def _same_run(config: RunConfig, former: RunConfig, source: Path) -> None:
    """Raises ConfigError that names all changed keys that may not change on resume."""
    now, before = config.model_dump(mode="json"), former.model_dump(mode="json")
    here, there = flatten(now), flatten(before)
    differing = [
        f"{key}: {there.get(key)} in the existing run, {here.get(key)} now"
        for key in changed_keys(before, now)
    ]
    if differing:
        raise ConfigError(
            "run_dir.other_config",
            f"run_dir={config.run_dir} contains a run with another configuration "
            f"({source.name}):\n  "
            + "\n  ".join(differing)
            + "\nRestore these values to resume it, or choose another run_dir.",
        )


def describe_run(
    config: RunConfig, info: DatasetInfo, mesh: Mesh, start: ResumePoint
) -> dict[str, Any]:
    """Writes config.yaml, and run.json with the ranks' process ids. Collective.

    Returns:
        What is in run.json.

    Raises:
        LeviathanError: the files cannot be written.
    """
    ranks = mesh.gather({"pid": os.getpid(), "host": socket.gethostname()})
    described = {
        "run_id": start.run_id,
        "world_size": mesh.world_size,
        "pid": [rank["pid"] for rank in ranks],
        "host": [rank["host"] for rank in ranks],
        "started_at_step": start.step,
        "machine": host_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "parameters": asdict(count_params(config.model)),
        "param_groups": model_groups(config.model, config.optim),
        "data_fingerprint": info.fingerprint,
    }
    with mesh.sync_errors():
        if mesh.rank == 0:
            described["code"] = code_version()
            with reported_write_errors(config.run_dir):
                write_atomic(config.run_dir / CONFIG, dump_config(config).encode())
                write_json(config.run_dir / RUN, described)
    return described


def model_groups(model: ModelConfig, optim: OptimConfig) -> list[dict[str, Any]]:
    """The resolved parameter groups of a model; see `describe_groups`.

    Raises:
        ConfigError: a name pattern of `optim.groups` matches no parameter.
    """
    return describe_groups(meta_model(model), optim)


def code_version() -> str:
    """The package version, with the commit in a git checkout: 0.1.0+g1a2b3c4d5e6f."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        # Ignores an unrelated repository that contains an installed package.
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            check=True,
            timeout=10,
        )
        described = subprocess.run(commit, capture_output=True, check=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+g{described.stdout.strip()}"
