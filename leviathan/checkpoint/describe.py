"""Summaries of checkpoints: step, writer and size."""

import math
from pathlib import Path
from typing import Any

from leviathan.checkpoint.dcp import stored_shapes
from leviathan.checkpoint.layout import complete_checkpoints, read_manifest, read_state
from leviathan.checkpoint.store import IMPORTED_KEY, WEIGHTS, read_run_config
from leviathan.errors import CheckpointError


def checkpoint_info(directory: Path) -> dict[str, Any]:
    """Step, tokens, writer and size of one checkpoint, from its small files.

    Raises:
        CheckpointError: one of these files is missing or corrupt.
    """
    manifest, config = read_manifest(directory), read_run_config(directory)
    state = read_state(directory, step=int, tokens=int, optimizer_steps=int, world_size=int)
    weights = [s for key, s in stored_shapes(directory).items() if key.startswith(WEIGHTS)]
    return {
        "checkpoint": str(directory),
        "step": state["step"],
        "steps": config.train.steps,
        "tokens": state["tokens"],
        "optimizer_steps": state["optimizer_steps"],
        "kind": config.model.embedding.kind,
        "parameters": sum(map(math.prod, weights)),
        "engine": "imported" if IMPORTED_KEY in state else engine_name(config.engine.model_dump()),
        "ranks": state["world_size"],
        "files": len(manifest),
        "bytes": sum(entry["bytes"] for entry in manifest.values()),
    }


def engine_name(engine: dict[str, Any]) -> str:
    """An engine's kind and settings, as in `deepspeed: precision fp32, zero_stage 2`."""
    settings = {key: value for key, value in engine.items() if key != "kind"}
    shown = [
        f"{key} {value}" for key, value in settings.items() if value is not False and value != {}
    ]
    return f"{engine['kind']}: {', '.join(shown)}"


def list_checkpoints(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Name → `checkpoint_info`, oldest first; for corrupt checkpoints, the error message.

    Raises:
        CheckpointError: the directory does not exist.
    """
    if not run_dir.is_dir():
        raise CheckpointError(
            "run.not_found", f"{run_dir}: no such directory; expected a run directory"
        )
    found: dict[str, dict[str, Any]] = {}
    for directory in complete_checkpoints(run_dir):
        try:
            found[directory.name] = checkpoint_info(directory)
        except CheckpointError as error:
            found[directory.name] = {"checkpoint": str(directory), "error": str(error)}
    return found


def checkpoints_table(found: dict[str, dict[str, Any]]) -> str:
    """Formats the result of `list_checkpoints` as a table."""
    lines = [f"{'':14}{'step':>10}{'tokens':>16}{'MB':>12}{'ranks':>7}  engine"]
    for name, info in found.items():
        if "error" in info:
            lines.append(f"{name:14}  {info['error']}")
            continue
        numbers = f"{info['step']:>10,}{info['tokens']:>16,}{info['bytes'] / 1e6:>12,.1f}"
        lines.append(f"{name:14}{numbers}{info['ranks']:>7}  {info['engine']}")
    return "\n".join(lines) if found else "no complete checkpoint"
