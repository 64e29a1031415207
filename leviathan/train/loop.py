"""The training loop."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leviathan.checkpoint.layout import resolve_checkpoint
from leviathan.checkpoint.store import check_init_from, fill_model, verify_checkpoint, warn_of
from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.console import progress_bar, say, times_on_lines
from leviathan.data.dataset import Dataset, open_dataset
from leviathan.data.format import DatasetInfo
from leviathan.data.loader import TrainLoader, check_fits
from leviathan.engine import build_engine
from leviathan.engine.base import Engine, StepStats
from leviathan.errors import LeviathanError
from leviathan.estimate.params import count_params
from leviathan.evaluate.in_loop import check_tasks, run_tasks, validate
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.optim import lr_at
from leviathan.parallel.heartbeat import HeartbeatMonitor
from leviathan.parallel.launch_env import keep_freed_memory, limit_threads, read_launch_env
from leviathan.parallel.mesh import Mesh, init_mesh
from leviathan.train.checkpoint_manager import CheckpointManager
from leviathan.train.metrics import Metrics, spike_threshold
from leviathan.train.metrics_log import METRICS, logged_losses
from leviathan.train.profiler import ProfileConfig, Profiler
from leviathan.train.run_dir import ResumePoint, describe_run, find_resume_point, lock_run_dir
from leviathan.train.signals import StopSignal
from leviathan.train.step_timer import CpuLoad, StepTimer, local_pids
from leviathan.train.trackers import Tracker, check_packages


def train(config: RunConfig, profile: ProfileConfig | None = None) -> None:
    """Trains a run, from its latest checkpoint if there is one, until it is complete or stopped.

    Runs as a single process, or as one rank of a launcher.

    Raises:
        ConfigError, DataError, CheckpointError: raised on every rank.
    """
    env = read_launch_env()
    plan = RunPlan(config, env.world_size)
    limit_threads(env)
    keep_freed_memory()
    mesh = init_mesh(env, config.parallel.tp, config.parallel.collective_timeout_s)
    watch = HeartbeatMonitor(
        mesh,
        config.parallel.heartbeat_timeout_s,
        "Shutting down the remaining ranks. Run the same command on the surviving nodes to resume "
        f"from the latest checkpoint in {config.run_dir}.",
    )
    with times_on_lines(), lock_run_dir(config.run_dir, mesh), StopSignal(mesh) as signal, watch:
        with mesh.sync_errors():
            if mesh.rank == 0:
                check_packages(config.tracking)
                check_tasks(config)
            dataset = open_dataset(config.data, config.model.seq_len)
            check_fits(dataset.info, config.model, config.train.global_batch_size)
        start = find_resume_point(config, dataset.info, mesh)
        if start.step >= config.train.steps:
            _check_learned(config, start.step - start.skipped)
            say(f"{config.run_dir}: already complete at step {start.step:,}.")
            return
        profiler = Profiler(profile, config.run_dir, mesh, config.engine.compile)
        _run(plan, mesh, dataset, start, signal, profiler)


def _run(
    plan: RunPlan,
    mesh: Mesh,
    dataset: Dataset,
    start: ResumePoint,
    signal: StopSignal,
    profiler: Profiler,
) -> None:
    config, steps, info = plan.config, plan.config.train.steps, dataset.info
    size = count_params(config.model)
    say(
        f"{size.kind}: {size.total:,} parameters, {mesh.world_size} rank(s), {steps:,} steps of "
        f"{config.train.global_batch_size * config.model.seq_len:,} tokens"
    )
    weights_from = None if start.checkpoint else first_weights(config, mesh)
    clock = StepTimer(mesh)
    engine = build_engine(
        lambda: profiler.attached(clock.attached(new_model(config, weights_from))), plan, mesh
    )
    if start.checkpoint:
        engine.load(start.checkpoint)
        say(f"Resuming from {start.checkpoint}")
    saving = CheckpointManager(engine, config, mesh)
    saving.check_space(resumed=start.checkpoint is not None)
    metrics = _metrics(config, mesh, start, info)
    data, batch = config.data, config.train
    stream = TrainLoader(
        dataset, config.seed, data.shuffle_window, batch.global_batch_size, batch.micro_batch_size
    )
    validates = "val" in info.splits and info.split("val").rows > 0
    done = start.step
    with (
        progress_bar("train", total=steps, start=done, plain=False) as bar,
        metrics,
        saving,
        profiler,
    ):
        for step in range(start.step, steps):
            with metrics.data_wait(), mesh.sync_errors():
                microbatches = stream.microbatches(step, mesh.dp_rank, mesh.dp)
            lr, done = lr_at(config.optim, steps, step), step + 1
            logs = plan.is_due("log", done) or done == 1
            profiled = profiler.covers(done)
            with (
                metrics.exclude_from_throughput(profiled),
                profiler.step(done),
                clock.sampling(logs and not profiled),
            ):
                stats = engine.train_step(microbatches, lr)
            metrics.add(stats, timed=not profiled)
            stop = signal.agreed(also=saving.failed)
            bar.advance(1, metrics.note(stats))
            spiking = _is_spike(stats, metrics, batch.spike_threshold_mads)
            rows = stream.sample_numbers(step).tolist() if spiking or stats.skipped else []
            if logs or spiking:
                sampled = clock.figures() if logs else None
                with mesh.sync_errors():
                    metrics.log(done, stats, lr, rows if spiking else None, sampled)
            if logs:
                say(metrics.line(done, stats, lr))
            if spiking:
                _warn_spike(done, stats, rows)
            if stats.skipped:
                _warn_skipped(done, metrics, config.optim.max_consecutive_skips, rows)
            if validates and plan.is_due("evaluate", done):
                with metrics.exclude_from_throughput():
                    found = _validation(engine, config, dataset, mesh, done)
                with mesh.sync_errors():
                    metrics.write(step=done, **found)
            if plan.is_due("tasks", done):
                with metrics.exclude_from_throughput():
                    found = _task_scores(engine, config, mesh, done)
                with mesh.sync_errors():
                    metrics.write(step=done, **found)
            if done == steps:
                _check_learned(config, engine.optimizer_steps)
            if stop or plan.is_due("checkpoint", done):
                with metrics.exclude_from_throughput(saving=True):
                    saving.save(_state(info, metrics, done, start.run_id))
            if stop:
                break
    if done < steps:
        say(
            f"{signal.reason()}: checkpoint saved at step {done:,}. Run the same command to resume."
        )
    else:
        skipped = f" ({metrics.skipped:,} steps skipped)" if metrics.skipped else ""
        say(f"{config.run_dir}: complete at step {steps:,}{skipped}.")
        if metrics.skipped_in_a_row:
            say(
                f"warning: the last {metrics.skipped_in_a_row:,} step(s) were skipped: their loss "
                "or gradients were not finite",
                style="yellow",
            )


def _check_learned(config: RunConfig, optimizer_steps: int) -> None:
    """Checks that a complete run has updated its weights at least once.

    Raises:
        LeviathanError: all steps were skipped.
    """
    if optimizer_steps == 0:
        raise LeviathanError(
            "train.all_steps_skipped",
            f"{config.run_dir}: all {config.train.steps:,} steps were skipped because loss or "
            "gradients were not finite; the weights are unchanged. Lower optim.lr, increase "
            "optim.warmup_steps, or inspect the samples listed above, and choose another run_dir.",
        )


def _metrics(config: RunConfig, mesh: Mesh, start: ResumePoint, info: DatasetInfo) -> Metrics:
    """The run's metrics, truncated to the step to resume from, and its trackers. Collective."""
    about = describe_run(config, info, mesh, start)
    with mesh.sync_errors():
        losses = logged_losses(config.run_dir / METRICS, start.step) if mesh.rank == 0 else []
    losses, size = mesh.broadcast(losses), count_params(config.model)
    with mesh.sync_errors():
        metrics = Metrics(
            config.run_dir / METRICS,
            start.step,
            start.tokens,
            start.skipped,
            size.flops_per_token,
            mesh.world_size,
            writes=mesh.rank == 0,
            losses=losses,
            steps=config.train.steps,
            six_n_flops_per_token=size.six_n_flops_per_token,
            peak_flops=config.train.peak_flops,
        )
        if mesh.rank == 0:
            metrics.load = CpuLoad(local_pids(about))
            metrics.tracker = Tracker(config, start.run_id, start.step, about)
    return metrics


def first_weights(config: RunConfig, mesh: Mesh) -> Path | None:
    """The checkpoint of `init_from`, verified; None without one. Collective.

    Raises:
        CheckpointError: it is missing or corrupt.
        ConfigError: its weights do not match this run's model, or its tokenizer does not match this
            run's dataset.
    """
    if config.init_from is None:
        return None
    with mesh.sync_errors():
        source = resolve_checkpoint(config.init_from)
    source = mesh.broadcast(source)
    with mesh.sync_errors():
        verify_checkpoint(source, mesh.rank, mesh.world_size)
        if mesh.rank == 0:
            warn_of(source, check_init_from(config, source))
    say(f"Initialized the weights from {source}")
    return source


def new_model(config: RunConfig, weights_from: Path | None = None) -> CausalLM:
    """Builds the model with its initial weights.

    They are a function of the seed and each parameter's name, or loaded from a checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    model = CausalLM(config.model)
    if weights_from is None:
        init_weights(model, config.model, config.seed)
    else:
        fill_model(model, weights_from)
    model.lm_head.z_loss = config.optim.z_loss
    return model


def _validation(
    engine: Engine, config: RunConfig, dataset: Dataset, mesh: Mesh, step: int
) -> dict[str, Any]:
    found = validate(engine, config, dataset, mesh)
    say(
        f"step {step:,}: validation loss {found.loss:.4f}",
        style=None if math.isfinite(found.loss) else "yellow",
    )
    return {"val_loss": found.loss, "val_loss_by_subset": found.by_subset}


def _task_scores(engine: Engine, config: RunConfig, mesh: Mesh, step: int) -> dict[str, Any]:
    """Scores of the tasks. If they cannot be run, prints a warning and training continues."""
    try:
        scores = run_tasks(engine, config, mesh, step)
    except LeviathanError as error:
        say(f"warning: step {step:,}: the tasks could not be run: {error}", style="yellow")
        return {"tasks": {}}
    shown = (f"{name} {value:.4f}" for name, value in scores.items() if "_stderr" not in name)
    say(f"step {step:,}: {', '.join(shown)}")
    return {"tasks": scores}


def _state(info: DatasetInfo, metrics: Metrics, step: int, run_id: str) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": metrics.tokens,
        "skipped": metrics.skipped,
        "data_fingerprint": info.fingerprint,
        "tracker_id": run_id,
    }


def _is_spike(stats: StepStats, metrics: Metrics, deviations: float) -> bool:
    return not stats.skipped and stats.loss > spike_threshold(metrics.losses, deviations)


def _warn_spike(step: int, stats: StepStats, rows: Sequence[int]) -> None:
    say(
        f"step {step:,}: loss spike: {stats.loss:.4f}. Samples of the batch: "
        f"{', '.join(map(str, rows[:8]))}, … (all in metrics.jsonl)",
        style="yellow",
    )


def _warn_skipped(step: int, metrics: Metrics, limit: int, rows: Sequence[int]) -> None:
    """Warns of a skipped step; ends a run with too many of them.

    Raises:
        LeviathanError: `limit` consecutive steps were skipped.
    """
    say(
        f"step {step:,}: skipped, because loss or gradients are not finite "
        f"({metrics.skipped:,} skipped so far; samples {', '.join(map(str, rows[:8]))}, …)",
        style="yellow",
    )
    if metrics.skipped_in_a_row >= limit:
        raise LeviathanError(
            "train.too_many_skips",
            f"step {step:,}: loss or gradients were not finite in {limit} consecutive steps "
            "(optim.max_consecutive_skips): lower optim.lr, lengthen optim.warmup_steps, or "
            "inspect the samples listed above",
        )
