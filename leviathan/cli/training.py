"""`leviathan train` and `checkpoint`."""

from pathlib import Path

import typer

from leviathan.cli.options import (
    AsJson,
    Checkpoint,
    Config,
    MemorySnapshot,
    Overrides,
    Profile,
    show,
)
from leviathan.config.load import load_config
from leviathan.config.run import RunConfig

checkpoint_app = typer.Typer(no_args_is_help=True, help="List, describe and verify checkpoints.")


def train(
    config: Config,
    overrides: Overrides = None,
    profile: Profile = None,
    memory_snapshot: MemorySnapshot = False,
) -> None:
    """Trains a model, as a single process or as a rank of `deepspeed`, `torchrun` or `srun`.

    The same command resumes an interrupted run from its latest valid checkpoint. SIGTERM or SIGUSR1
    to any rank saves a checkpoint and ends the run with exit status 0.

    Metrics are written to `run_dir/metrics.jsonl` and to the trackers every `train.log_every`
    steps. `evaluate.tasks=[piqa] evaluate.every=1000` runs lm-eval tasks during training.

    Example: `deepspeed --num_accelerators 2 launch/train.py configs/run/quickstart.yaml`
    """
    loaded = load_config(config, overrides or [], RunConfig)
    from leviathan.train.loop import train as run
    from leviathan.train.profiler import parse_profile

    run(loaded, parse_profile(profile, memory_snapshot, loaded.train.steps))


@checkpoint_app.command("ls")
def checkpoint_ls(run_dir: Path, as_json: AsJson = False) -> None:
    """Lists the complete checkpoints of a run, without verifying their contents."""
    from leviathan.checkpoint.describe import checkpoints_table, list_checkpoints

    show(list_checkpoints(run_dir), as_json, checkpoints_table)


@checkpoint_app.command("info")
def checkpoint_info(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Shows the step, tokens, model, engine and size of a checkpoint."""
    from leviathan.checkpoint.describe import checkpoint_info as info
    from leviathan.checkpoint.layout import resolve_checkpoint

    show(info(resolve_checkpoint(checkpoint)), as_json)


@checkpoint_app.command("verify")
def checkpoint_verify(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Verifies the hashes of a checkpoint and that its tensors are complete.

    Exits with status 2 and an error message if the checkpoint is corrupt.
    """
    from leviathan.checkpoint.layout import resolve_checkpoint
    from leviathan.checkpoint.store import verify_checkpoint

    path = resolve_checkpoint(checkpoint)
    show({"checkpoint": str(path), "files": verify_checkpoint(path), "verified": True}, as_json)
