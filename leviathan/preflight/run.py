"""What follows from the configuration: ranks, cost, memory, checkpoints, the run's folder."""

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from leviathan.checkpoint.init_from import check_init_from
from leviathan.checkpoint.layout import complete_checkpoints, resolve_checkpoint, step_of
from leviathan.checkpoint.load import verify_checkpoint
from leviathan.checkpoint.retention import retention
from leviathan.config.plan import RunPlan
from leviathan.config.schema import RunConfig
from leviathan.data.format import DatasetInfo
from leviathan.errors import ConfigError
from leviathan.model.accounting import account
from leviathan.model.footprint import Device, layout_of
from leviathan.model.memory import memory
from leviathan.model.scale import USABLE, Hardware, estimate
from leviathan.preflight.report import Report, duration, size
from leviathan.train.run_dir import LOCK, first_start, model_groups, resumed_start

TIGHT = 0.8  # of the memory: beyond, fragmentation may be too much
TILE = 8  # of bf16 values: tensor cores take matrices in multiples of it
IDLE = 0.1  # of the rows that are computed
LONG_S = 3600  # of a run that should not be lost
WAITING = 0.5  # of a step in communication


@dataclass(frozen=True)
class Target:
    """What the run shall train on."""

    name: str
    device: Device
    hardware: Hardware
    assumed: bool  # not seen on this machine, nor asked for


def check_ranks(report: Report, config: RunConfig, world_size: int) -> RunPlan:
    """How a step is cut up.

    Raises:
        ConfigError: the world cannot be cut this way, and nothing else follows.
    """
    plan, train = RunPlan(config, world_size), config.train
    layout_of(config, world_size)
    rows = plan.micro_batches * -(-plan.rows_per_rank_max // plan.micro_batches)
    idle = 1 - train.global_batch_size / (rows * plan.dp)
    why = (
        f"{world_size} = {plan.dp} data-parallel × {config.parallel.tp} tensor-parallel; "
        f"{train.global_batch_size:,} sequences a step in {plan.micro_batches} micro-batch(es) "
        f"of {rows // plan.micro_batches} a rank"
    )
    if idle > IDLE:
        hint = f"choose a batch that {plan.dp} ranks share evenly"
        report.say("ranks", "amber", f"{why}; {idle:.0%} of the work is filling: {hint}")
    else:
        report.say("ranks", "green", why)
    return plan


def check_model(report: Report, config: RunConfig) -> None:
    """Parameters and FLOPs; shapes that run slowly."""
    found, model = account(config.model), config.model
    report.figures["parameters"] = {
        name: getattr(found, name) for name in ("total", "input_embedding", "output_head", "body")
    }
    report.figures["flops_per_token"] = found.flops_per_token
    why = (
        f"{found.kind}: {found.total:,} parameters ({found.input_embedding:,} in the input "
        f"embedding), {found.flops_per_token:.3g} FLOPs a token"
    )
    odd = [
        f"{name} is no multiple of {tile}"
        for name, value, tile in (
            ("padded_vocab_size", model.padded_vocab_size // config.parallel.tp, TILE),
            ("d_model / n_heads", model.d_model // model.n_heads, 8),
        )
        if value % tile
    ]
    odd += [
        f"optim.groups: no parameter of this model matches {row['selector']}"
        for row in model_groups(config)
        if not row["tensors"]
    ]
    report.say("model", "amber" if odd else "green", "; ".join([why, *odd]))


def check_cost(report: Report, plan: RunPlan, target: Target) -> None:
    """Time and device-hours, at the stated utilisation of the stated peak."""
    config, machine = plan.config, target.hardware
    tokens = config.train.steps * config.train.global_batch_size * config.model.seq_len
    report.figures |= {"steps": config.train.steps, "tokens": tokens}
    length = f"{config.train.steps:,} steps, {tokens:,} tokens"
    if not machine.flops:
        hint = "--peak-tflops, or `leviathan launch … --probe`, tells how long they take"
        report.say("time", "green", f"{length}; {hint}")
        return
    layout = layout_of(config, plan.world_size, target.device)
    cost = estimate(config.model, layout, config.train.global_batch_size, machine)
    seconds = config.train.steps * cost.compute_s
    hours = seconds * plan.world_size / 3600
    report.figures |= {"seconds": seconds, "device_hours": hours, "mfu": machine.mfu}
    report.figures["communication_share"] = cost.communication_share
    why = (
        f"{length}: {duration(seconds)}, {hours:,.3g} device-hours at {machine.mfu:.0%} of "
        f"{machine.flops / 1e12:g} TFLOP/s; communication at most {cost.communication_share:.0%} "
        "more of a step"
    )
    verdict, hints = "green", []
    if cost.communication_share > WAITING:
        hints.append("ranks would wait more than they work: fewer of them, or a larger batch")
    if target.device == "cuda" and config.engine.precision == "fp32":
        hints.append("engine.precision=fp32 is far from that peak, which is bf16's")
    if hints:
        verdict, why = "amber", "; ".join([why, *hints])
    report.say("time", verdict, why)


def check_memory(report: Report, plan: RunPlan, target: Target) -> None:
    """A rank's memory by part against the device's."""
    layout = layout_of(plan.config, plan.world_size, target.device)
    held, room = memory(plan.config.model, layout), target.hardware.memory_bytes
    report.figures["memory"] = {
        **held.parts, "total": held.total, "moment": held.moment, "device_bytes": room
    }  # fmt: skip
    parts = ", ".join(f"{name} {size(part)}" for name, part in held.parts.items() if part)
    where = f"{target.name}{' (assumed: say --device)' if target.assumed else ''}"
    why = f"{size(held.total)} of {size(room)} a rank on {where}, {held.moment}: {parts}"
    if held.total > USABLE * room:
        remedies = ["a smaller train.micro_batch_size"] if layout.micro_batch_size > 1 else []
        if not layout.recompute:
            remedies.append("engine.activation_checkpointing=true")
        if layout.dp > layout.shards or layout.zero_stage < 3:
            remedies.append("a higher engine.zero_stage or engine.kind=fsdp2")
        report.say("memory", "red", f"{why}. Try {', '.join([*remedies, 'more ranks'])}")
    elif held.total > TIGHT * room:
        report.say("memory", "amber", f"{why}. Tight: the allocator needs some of the rest")
    else:
        report.say("memory", "green", why)


def check_checkpoints(report: Report, config: RunConfig, world_size: int = 1) -> None:
    """What is kept against the free space of the run folder's disk."""
    plan, place = retention(config, world_size), existing_folder(config.run_dir)
    free = shutil.disk_usage(place).free
    wanted = max(plan.bytes_needed, plan.bytes_each)
    report.figures["checkpoints"] = {
        "bytes": plan.bytes_each,
        "saves": plan.saves,
        "kept": len(plan.kept),
        "at_once": plan.at_once,
        "free_bytes": free,
    }
    why = (
        f"{size(plan.bytes_each)} each, {plan.saves:,} saved, {len(plan.kept):,} kept (at most "
        f"{plan.at_once:,} at once, {size(plan.at_once * plan.bytes_each)}); {size(free)} free at "
        f"{place}"
    )
    seconds = report.figures.get("seconds", 0)
    if free < wanted:
        fewer = "make room, lower checkpoint.keep_last, or choose another run_dir"
        report.say("checkpoints", "red", f"{why}: {fewer}")
    elif not config.checkpoint.every and seconds > LONG_S:
        lost = f"a loss costs up to {duration(seconds)}: set checkpoint.every"
        report.say("checkpoints", "amber", f"{why}; only the end is saved, {lost}")
    else:
        report.say("checkpoints", "green", why)


def check_folder(report: Report, config: RunConfig, info: DatasetInfo | None) -> None:
    """Whether the folder can be written, and what it holds."""
    there = complete_checkpoints(config.run_dir)
    existing = existing_folder(config.run_dir)
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(
            "run_dir.not_writable",
            f"{existing}: not a folder that may be written to; choose another run_dir",
        )
    if _at_work(config.run_dir / LOCK):
        raise ConfigError(
            "run_dir.locked",
            f"{config.run_dir}: another process is training there; wait, or stop it",
        )
    if there and info is not None:
        start = resumed_start(config, info, there[-1])
        report.figures["starts_at_step"] = start.step
        if start.step >= config.train.steps:
            report.say("run folder", "amber", f"{config.run_dir}: complete after {start.step:,} "
                       "steps: nothing would be trained; choose another run_dir")  # fmt: skip
            return
        why = f"{config.run_dir}: goes on after step {start.step:,} ({there[-1].name})"
    elif there:
        why = f"{config.run_dir}: holds checkpoints up to step {step_of(there[-1]):,}"
    else:
        first_start(config)
        report.figures["starts_at_step"] = 0
        why = f"{config.run_dir}: begins with step 0"
    report.say("run folder", "green", why)


def check_first_weights(report: Report, config: RunConfig) -> None:
    """Checks the weights of `init_from` against the model and the dataset."""
    assert config.init_from is not None
    source = resolve_checkpoint(config.init_from)
    verify_checkpoint(source)
    warnings = check_init_from(config, source)
    verdict = "amber" if warnings else "green"
    report.say("init_from", verdict, "; ".join([f"weights of {source}", *warnings]))


def _at_work(lock: Path) -> bool:
    """Whether somebody holds a run's lock."""
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
