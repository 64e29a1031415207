"""`check --probe`: what the ranks themselves can do, seen on the ranks themselves.

A step is as slow as its slowest rank, and no rank of a step tells which one that is: each waits for
the others. So every rank first works for itself, on the same block of the model, all at once.
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
from leviathan.config.schema import RunConfig
from leviathan.console import say
from leviathan.data.dataset import open_dataset
from leviathan.data.stream import TrainStream, check_fits
from leviathan.engine import build_engine
from leviathan.engine.base import Engine
from leviathan.model.footprint import BUCKET, layout_of
from leviathan.model.memory import memory
from leviathan.model.transformer import Block, rotary
from leviathan.optim import lr_at
from leviathan.parallel.launch_env import keep_pages, read_launch_env, share_cores
from leviathan.parallel.mesh import Mesh, init_mesh
from leviathan.parallel.watch import Watch
from leviathan.preflight.report import Report, duration, size
from leviathan.preflight.run import existing_folder
from leviathan.train.loop import new_model

SLOW = 1.3  # times the median rank's time
WORK_S = 2.0
STEPS = 2
BUCKET_BYTES = 1 << 26
ROUNDS = 5
STALL = 0.05  # of the time between two checkpoints


def probe(config: RunConfig) -> Report:
    """Two steps, a save and a bandwidth test on these ranks. Collective; leaves nothing behind.

    Raises:
        ConfigError, DataError, CheckpointError: the same on every rank.
    """
    env = read_launch_env()
    plan, report = RunPlan(config, env.world_size), Report()
    share_cores(env)
    keep_pages()
    mesh = init_mesh(env, config.parallel.tp, config.parallel.timeout_s)
    report.figures["world_size"] = mesh.world_size
    with Watch(mesh, config.parallel.lost_after_s, "The others end now."):
        say(f"Each of {mesh.world_size} rank(s) works {WORK_S:g} s for itself")
        time_compute(report, config, mesh)
        _bandwidth(report, config, mesh)
        engine = build_engine(lambda: new_model(config), plan, mesh)
        step_s = _steps(report, plan, mesh, engine)
        with _beside(config, mesh) as folder:
            _save(report, config, mesh, engine, folder, step_s)
    return report


def time_compute(report: Report, config: RunConfig, mesh: Mesh) -> None:
    """Every rank's time for a block forward and backward, all at the same time."""
    passes = _block_passes(config, mesh.device)
    next(passes)
    mesh.any(False)  # together: ranks that share a processor shall feel it
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
        report.say(
            "compute",
            "amber",
            f"{named} the median of {median * 1e3:.2f} ms a block; the others will wait for it: "
            "look at its clocks, its temperature, and who else is at work there",
        )
        return
    why = f"{median * 1e3:.2f} ms a block; the slowest rank {max(times) / median:.2f} times that"
    report.say("compute", "green", why)


def _block_passes(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Endless passes through one block of the model, each done when it is yielded."""
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
    """Bytes a second that a rank sends in an all-reduce, as rings send them."""
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
    # The last rank's: the first to come only waits.
    seconds = max(mesh.gather(time.perf_counter() - begin)) / ROUNDS
    sent = 2 * (mesh.world_size - 1) / mesh.world_size * _bytes(bucket)
    report.figures["bandwidth_bytes_per_s"] = sent / seconds
    report.say("bandwidth", "green", f"{size(sent / seconds)}/s a rank: an all-reduce of "
               f"{size(_bytes(bucket))} takes {seconds * 1e3:.1f} ms")  # fmt: skip


def _steps(report: Report, plan: RunPlan, mesh: Mesh, engine: Engine) -> float:
    """Real steps on the run's first batches; seconds of the last."""
    config = plan.config
    with mesh.together():
        dataset = open_dataset(config.data, config.model.seq_len)
        check_fits(dataset.info, config.model, config.train.global_batch_size)
    data, batch = config.data, config.train
    stream = TrainStream(
        dataset, config.seed, data.shuffle_window, batch.global_batch_size, batch.micro_batch_size
    )
    seconds, losses, tokens = [], [], 0
    for step in range(min(STEPS, batch.steps)):
        with mesh.together():
            microbatches = stream.microbatches(step, mesh.dp_rank, mesh.dp)
        begin = time.perf_counter()
        stats = engine.train_step(microbatches, lr_at(config.optim, batch.steps, step))
        _finished(mesh.device)
        seconds.append(max(mesh.gather(time.perf_counter() - begin)))
        losses.append(stats.loss)
        tokens = stats.tokens
        if stats.skipped:
            report.say("steps", "red", f"step {step + 1}: loss or gradients are not finite")
            return seconds[-1]
    whole = seconds[-1] * batch.steps
    report.figures |= {"losses": losses, "step_s": seconds[-1], "seconds": whole}
    report.say(
        "steps",
        "green",
        f"{len(losses)} done, losses {', '.join(f'{loss:.4f}' for loss in losses)}; the last took "
        f"{seconds[-1]:.3g} s, {tokens / seconds[-1]:,.0f} tokens/s: {duration(whole)} for "
        f"{batch.steps:,}",
    )
    if mesh.device.type == "cuda":
        _memory(report, plan, mesh)
    return seconds[-1]


def _memory(report: Report, plan: RunPlan, mesh: Mesh) -> None:
    """The peak as CUDA's allocator saw it, beside the estimate."""
    peak = max(mesh.gather(torch.cuda.max_memory_allocated()))
    room = torch.cuda.get_device_properties(mesh.device).total_memory
    expected = memory(plan.config.model, layout_of(plan.config, plan.world_size)).total
    report.figures["memory"] = {"peak": peak, "estimate": expected, "device_bytes": room}
    report.say("memory", "green", f"at most {size(peak)} of {size(room)}; estimated were "
               f"{size(expected)}")  # fmt: skip


def _save(
    report: Report, config: RunConfig, mesh: Mesh, engine: Engine, folder: Path, step_s: float
) -> None:
    """Writes the tensors of a checkpoint."""
    begin = time.perf_counter()
    engine.save(folder).wait()
    seconds = max(mesh.gather(time.perf_counter() - begin))
    written = mesh.broadcast(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    report.figures["save"] = {"bytes": written, "seconds": seconds}
    why = f"{size(written)} in {seconds:.3g} s, {size(written / seconds)}/s"
    every = config.checkpoint.every
    if every and seconds > every * step_s:
        report.say("save", "red", f"{why}: longer than the {every} steps between two of them "
                   "(checkpoint.every)")  # fmt: skip
    elif every and not config.checkpoint.background and seconds > STALL * every * step_s:
        share = seconds / (every * step_s)
        report.say("save", "amber", f"{why}: {share:.0%} of the time; checkpoint.background=true "
                   "writes beside the training")  # fmt: skip
    else:
        report.say("save", "green", why)


@contextmanager
def _beside(config: RunConfig, mesh: Mesh) -> Iterator[Path]:
    """A folder on the run folder's filesystem, and gone afterwards.

    Its name is always the same, so that what a killed probe has left goes with the next one.
    """
    folder = Path()
    with mesh.together():
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
