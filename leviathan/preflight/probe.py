"""`check --probe`: measurements on the ranks of a launch.

A step is as slow as its slowest rank, but within a step all ranks wait for each other and look
equally slow. Therefore every rank first computes the same block on its own, all at the same time.
"""

import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.console import say
from leviathan.data.dataset import open_dataset
from leviathan.data.loader import TrainLoader, check_fits
from leviathan.engine import build_engine
from leviathan.engine.base import Engine
from leviathan.estimate.layout import BUCKET, parallel_layout
from leviathan.estimate.memory import memory
from leviathan.formatting import format_bytes, format_duration
from leviathan.model.transformer import Block, rotary
from leviathan.optim import lr_at
from leviathan.parallel.heartbeat import HeartbeatMonitor
from leviathan.parallel.launch_env import keep_freed_memory, limit_threads, read_launch_env
from leviathan.parallel.mesh import Mesh, init_mesh
from leviathan.preflight.checks import Report, existing_folder
from leviathan.train.loop import new_model

SLOW = 1.3  # factor over the median rank's time
WORK_S = 2.0
STEPS = 2
BUCKET_BYTES = 1 << 26
ROUNDS = 5
STALL = 0.05  # share of the time between two checkpoints


def probe(config: RunConfig) -> Report:
    """Measures two steps, a save and the bandwidth, and removes all files. Collective.

    Raises:
        ConfigError, DataError, CheckpointError: the same on every rank.
    """
    env = read_launch_env()
    plan, report = RunPlan(config, env.world_size), Report()
    limit_threads(env)
    keep_freed_memory()
    mesh = init_mesh(env, config.parallel.tp, config.parallel.collective_timeout_s)
    report.figures["world_size"] = mesh.world_size
    with HeartbeatMonitor(
        mesh, config.parallel.heartbeat_timeout_s, "Shutting down the remaining ranks."
    ):
        say(f"Measuring compute on {mesh.world_size} rank(s) for {WORK_S:g} s")
        time_compute(report, config, mesh)
        _bandwidth(report, config, mesh)
        engine = build_engine(lambda: new_model(config), plan, mesh)
        step_s = _steps(report, plan, mesh, engine)
        with _scratch_dir(config, mesh) as folder:
            _save(report, config, mesh, engine, folder, step_s)
    return report


def time_compute(report: Report, config: RunConfig, mesh: Mesh) -> None:
    """Measures the forward and backward time of one block on all ranks simultaneously."""
    passes = _block_passes(config, mesh.device)
    next(passes)
    mesh.any(False)  # start together, so that ranks that share a processor compete
    begin, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < WORK_S or not count:
        next(passes)
        count += 1
    times = mesh.gather(spent / count)
    median = statistics.median_low(times)
    slow = [rank for rank, mine in enumerate(times) if mine > SLOW * median]
    report.figures |= {"compute_s": times, "slow_ranks": slow}
    if slow:
        named = ", ".join(f"rank {rank} takes {times[rank] / median:.2f} times" for rank in slow)
        report.add(
            "compute",
            "warning",
            f"{named} the median of {median * 1e3:.2f} ms per block and slows all ranks. Check its "
            "clocks, temperature and other processes.",
        )
        return
    why = (
        f"median {median * 1e3:.2f} ms per block; slowest rank {max(times) / median:.2f} times that"
    )
    report.add("compute", "ok", why)


def _block_passes(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Yields after each completed forward and backward pass of one block."""
    model = config.model
    dtype = torch.bfloat16 if config.engine.precision == "bf16" else torch.float32
    block = Block(model).to(device, dtype)
    cos, sin = (t.to(dtype) for t in rotary(model.seq_len, model, device))
    shape = config.train.micro_batch_size, model.seq_len, model.d_model
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    while True:
        block(x, cos, sin).sum().backward()
        _finished(device)
        yield


def _bandwidth(report: Report, config: RunConfig, mesh: Mesh) -> None:
    """Measures the bytes/s that each rank sends in a ring all-reduce."""
    if mesh.world_size == 1:
        return
    bucket = torch.zeros(min(BUCKET_BYTES // 4, BUCKET), device=mesh.device)
    dist.all_reduce(bucket)
    _finished(mesh.device)
    mesh.any(False)
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(bucket)
    _finished(mesh.device)
    # The slowest rank's time: the others only wait.
    seconds = max(mesh.gather(time.perf_counter() - begin)) / ROUNDS
    sent = 2 * (mesh.world_size - 1) / mesh.world_size * _bytes(bucket)
    report.figures["bandwidth_bytes_per_s"] = sent / seconds
    report.add("bandwidth", "ok", f"{format_bytes(sent / seconds)}/s per rank: an all-reduce of "
               f"{format_bytes(_bytes(bucket))} takes {seconds * 1e3:.1f} ms")  # fmt: skip


def _steps(report: Report, plan: RunPlan, mesh: Mesh, engine: Engine) -> float:
    """Trains on the first batches of the run; returns the seconds of the last step."""
    config = plan.config
    with mesh.sync_errors():
        dataset = open_dataset(config.data, config.model.seq_len)
        check_fits(dataset.info, config.model, config.train.global_batch_size)
    data, batch = config.data, config.train
    stream = TrainLoader(
        dataset, config.seed, data.shuffle_window, batch.global_batch_size, batch.micro_batch_size
    )
    seconds, losses, tokens = [], [], 0
    for step in range(min(STEPS, batch.steps)):
        with mesh.sync_errors():
            microbatches = stream.microbatches(step, mesh.dp_rank, mesh.dp)
        begin = time.perf_counter()
        stats = engine.train_step(microbatches, lr_at(config.optim, batch.steps, step))
        _finished(mesh.device)
        seconds.append(max(mesh.gather(time.perf_counter() - begin)))
        losses.append(stats.loss)
        tokens = stats.tokens
        if stats.skipped:
            report.add("steps", "error", f"step {step + 1}: loss or gradients are not finite")
            return seconds[-1]
    total_s = seconds[-1] * batch.steps
    report.figures |= {"losses": losses, "step_s": seconds[-1], "seconds": total_s}
    report.add(
        "steps",
        "ok",
        f"{len(losses)} steps, losses {', '.join(f'{loss:.4f}' for loss in losses)}; the last took "
        f"{seconds[-1]:.3g} s, {tokens / seconds[-1]:,.0f} tokens/s: "
        f"{format_duration(total_s)} for {batch.steps:,} steps",
    )
    if mesh.device.type == "cuda":
        _memory(report, plan, mesh)
    return seconds[-1]


def _memory(report: Report, plan: RunPlan, mesh: Mesh) -> None:
    """Reports the peak of allocated CUDA memory together with the estimate."""
    peak = max(mesh.gather(torch.cuda.max_memory_allocated()))
    room = torch.cuda.get_device_properties(mesh.device).total_memory
    expected = memory(plan.config.model, parallel_layout(plan.config, plan.world_size)).total
    report.figures["memory"] = {"peak": peak, "estimate": expected, "device_bytes": room}
    report.add("memory", "ok", f"peak {format_bytes(peak)} of {format_bytes(room)}; estimate "
               f"{format_bytes(expected)}")  # fmt: skip


def _save(
    report: Report, config: RunConfig, mesh: Mesh, engine: Engine, folder: Path, step_s: float
) -> None:
    """Measures the writing of a checkpoint's tensors."""
    begin = time.perf_counter()
    engine.save(folder).wait()
    seconds = max(mesh.gather(time.perf_counter() - begin))
    written = mesh.broadcast(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    report.figures["save"] = {"bytes": written, "seconds": seconds}
    why = f"{format_bytes(written)} in {seconds:.3g} s, {format_bytes(written / seconds)}/s"
    every = config.checkpoint.every
    if every and seconds > every * step_s:
        report.add("save", "error", f"{why}: longer than the {every} steps between two saves "
                   "(checkpoint.every)")  # fmt: skip
    elif every and not config.checkpoint.async_save and seconds > STALL * every * step_s:
        share = seconds / (every * step_s)
        report.add("save", "warning", f"{why}: {share:.0%} of the training time; use "
                   "checkpoint.async_save=true")  # fmt: skip
    else:
        report.add("save", "ok", why)


@contextmanager
def _scratch_dir(config: RunConfig, mesh: Mesh) -> Iterator[Path]:
    """A temporary directory on the filesystem of the run directory.

    Its name is fixed, so that the next probe removes the file of a killed one.
    """
    folder = Path()
    with mesh.sync_errors():
        if mesh.rank == 0:
            parent = existing_folder(config.run_dir.absolute().parent)
            folder = parent / f".{config.run_dir.name}.probe"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
    folder = mesh.broadcast(folder)
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, former)
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
