"""Checks of a configuration: ranks, time, memory, checkpoints and the run directory."""

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
from leviathan.formatting import format_bytes, format_duration
from leviathan.locks import is_locked
from leviathan.model.cost_model import USABLE_MEMORY, Hardware, estimate
from leviathan.model.memory import memory
from leviathan.model.model_stats import count_params
from leviathan.model.parallel_layout import Device, parallel_layout
from leviathan.preflight.report import Report
from leviathan.train.run_dir import LOCK, model_groups, new_resume_point, resume_point_of

TIGHT = 0.8  # share of the memory above which fragmentation may exceed the rest
TILE = 8  # bf16 values: tensor cores need dimensions that are multiples of it
IDLE = 0.1  # share of computed samples that are padding
LONG_S = 3600  # a run that takes longer needs checkpoints
WAITING = 0.5  # share of a step in communication


@dataclass(frozen=True)
class Target:
    """The device that the run will use."""

    name: str
    device: Device
    hardware: Hardware
    assumed: bool  # neither present on this machine nor given


def check_ranks(report: Report, config: RunConfig, world_size: int) -> RunPlan:
    """Checks how the ranks divide a step.

    Raises:
        ConfigError: the number of ranks is not divisible as configured.
    """
    plan, train = RunPlan(config, world_size), config.train
    parallel_layout(config, world_size)
    rows = plan.micro_batches * -(-plan.rows_per_rank_max // plan.micro_batches)
    idle = 1 - train.global_batch_size / (rows * plan.dp)
    why = (
        f"{world_size} = {plan.dp} data-parallel × {config.parallel.tp} tensor-parallel; "
        f"{train.global_batch_size:,} samples per step in {plan.micro_batches} "
        f"micro-batch(es) of {rows // plan.micro_batches} per rank"
    )
    if idle > IDLE:
        hint = f"use a global batch size that is divisible by {plan.dp}"
        report.add(
            "ranks", "warning", f"{why}; {idle:.0%} of the computed samples are padding: {hint}"
        )
    else:
        report.add("ranks", "ok", why)
    return plan


def check_model(report: Report, config: RunConfig) -> None:
    """Reports parameters and FLOPs; warns of shapes that run slowly."""
    found, model = count_params(config.model), config.model
    report.figures["parameters"] = {
        name: getattr(found, name) for name in ("total", "input_embedding", "output_head", "body")
    }
    report.figures["flops_per_token"] = found.flops_per_token
    why = (
        f"{found.kind}: {found.total:,} parameters ({found.input_embedding:,} in the input "
        f"embedding), {found.flops_per_token:.3g} FLOPs per token"
    )
    odd = [
        f"{name} is not a multiple of {tile}"
        for name, value, tile in (
            ("padded_vocab_size", model.padded_vocab_size // config.parallel.tp, TILE),
            ("d_model / n_heads", model.d_model // model.n_heads, 8),
        )
        if value % tile
    ]
    odd += [
        f"optim.groups: no parameter of this model matches {row['selector']}"
        for row in model_groups(model, config.optim)
        if not row["tensors"]
    ]
    report.add("model", "warning" if odd else "ok", "; ".join([why, *odd]))


def check_cost(report: Report, plan: RunPlan, target: Target) -> None:
    """Estimates time and device-hours from peak FLOP/s and MFU."""
    config, machine = plan.config, target.hardware
    tokens = config.train.steps * config.train.global_batch_size * config.model.seq_len
    report.figures |= {"steps": config.train.steps, "tokens": tokens}
    length = f"{config.train.steps:,} steps, {tokens:,} tokens"
    if not machine.flops:
        hint = "for an estimate of the time, use --peak-tflops or `leviathan launch … --probe`"
        report.add("time", "ok", f"{length}; {hint}")
        return
    layout = parallel_layout(config, plan.world_size, target.device)
    cost = estimate(config.model, layout, config.train.global_batch_size, machine)
    seconds = config.train.steps * cost.compute_s
    hours = seconds * plan.world_size / 3600
    report.figures |= {"seconds": seconds, "device_hours": hours, "mfu": machine.mfu}
    report.figures["communication_share"] = cost.communication_share
    why = (
        f"{length}: {format_duration(seconds)}, {hours:,.3g} device-hours at {machine.mfu:.0%} of "
        f"{machine.flops / 1e12:g} TFLOP/s; communication adds at most "
        f"{cost.communication_share:.0%} to a step"
    )
    level, hints = "ok", []
    if cost.communication_share > WAITING:
        hints.append("communication dominates: use fewer ranks or a larger global batch")
    if target.device == "cuda" and config.engine.precision == "fp32":
        hints.append("engine.precision=fp32 cannot reach this peak, which is for bf16")
    if hints:
        level, why = "warning", "; ".join([why, *hints])
    report.add("time", level, why)


def check_memory(report: Report, plan: RunPlan, target: Target) -> None:
    """Compares the memory per rank, by part, with the memory of the device."""
    layout = parallel_layout(plan.config, plan.world_size, target.device)
    held, room = memory(plan.config.model, layout), target.hardware.memory_bytes
    report.figures["memory"] = {
        **held.by_part, "total": held.total, "moment": held.moment, "device_bytes": room
    }  # fmt: skip
    parts = ", ".join(f"{name} {format_bytes(part)}" for name, part in held.by_part.items() if part)
    where = f"{target.name}{' (assumed; set --device)' if target.assumed else ''}"
    why = (
        f"{format_bytes(held.total)} of {format_bytes(room)} per rank on {where}, {held.moment}: "
        f"{parts}"
    )
    if held.total > USABLE_MEMORY * room:
        remedies = ["a smaller train.micro_batch_size"] if layout.micro_batch_size > 1 else []
        if not layout.recompute:
            remedies.append("engine.activation_checkpointing=true")
        if layout.dp > layout.shards or layout.zero_stage < 3:
            remedies.append("a higher engine.zero_stage or engine.kind=fsdp2")
        report.add("memory", "error", f"{why}. Try {', '.join([*remedies, 'more ranks'])}")
    elif held.total > TIGHT * room:
        report.add("memory", "warning", f"{why}. Fragmentation may exceed the remaining memory")
    else:
        report.add("memory", "ok", why)


def check_checkpoints(report: Report, config: RunConfig, world_size: int = 1) -> None:
    """Compares the size of the kept checkpoints with the free disk space."""
    plan, place = retention(config, world_size), existing_folder(config.run_dir)
    free = shutil.disk_usage(place).free
    needed = max(plan.bytes_needed, plan.bytes_each)
    report.figures["checkpoints"] = {
        "bytes": plan.bytes_each,
        "saves": plan.saves,
        "kept": len(plan.kept),
        "at_once": plan.at_once,
        "free_bytes": free,
    }
    why = (
        f"{format_bytes(plan.bytes_each)} each; {plan.saves:,} saved, {len(plan.kept):,} kept, at "
        f"most {plan.at_once:,} at once ({format_bytes(plan.at_once * plan.bytes_each)}); "
        f"{format_bytes(free)} free at {place}"
    )
    seconds = report.figures.get("seconds", 0)
    if free < needed:
        fewer = "free disk space, lower checkpoint.keep_last, or choose another run_dir"
        report.add("checkpoints", "error", f"{why}: {fewer}")
    elif not config.checkpoint.every and seconds > LONG_S:
        lost = f"a failure loses up to {format_duration(seconds)}: set checkpoint.every"
        report.add("checkpoints", "warning", f"{why}; only the final step is saved, so {lost}")
    else:
        report.add("checkpoints", "ok", why)


def check_run_dir(report: Report, config: RunConfig, info: DatasetInfo | None) -> None:
    """Checks that the run directory is writable, unlocked and compatible with the run."""
    there = complete_checkpoints(config.run_dir)
    existing = existing_folder(config.run_dir)
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(
            "run_dir.not_writable",
            f"{existing}: not a writable directory. Choose another run_dir.",
        )
    if is_locked(config.run_dir / LOCK):
        raise ConfigError(
            "run_dir.locked",
            f"{config.run_dir}: another process is training in this directory. Wait for it, or "
            "stop it.",
        )
    if there and info is not None:
        start = resume_point_of(config, info, there[-1])
        report.figures["starts_at_step"] = start.step
        if start.step >= config.train.steps:
            report.add("run_dir", "warning", f"{config.run_dir}: complete at step {start.step:,}: "
                       "no step would be trained; choose another run_dir")  # fmt: skip
            return
        why = f"{config.run_dir}: resumes from step {start.step:,} ({there[-1].name})"
    elif there:
        why = f"{config.run_dir}: contains checkpoints up to step {step_of(there[-1]):,}"
    else:
        new_resume_point(config)
        report.figures["starts_at_step"] = 0
        why = f"{config.run_dir}: starts at step 0"
    report.add("run_dir", "ok", why)


def check_first_weights(report: Report, config: RunConfig) -> None:
    """Checks the weights of `init_from` against the model and the dataset."""
    assert config.init_from is not None
    source = resolve_checkpoint(config.init_from)
    verify_checkpoint(source)
    warnings = check_init_from(config, source)
    level = "warning" if warnings else "ok"
    report.add("init_from", level, "; ".join([f"weights of {source}", *warnings]))


def existing_folder(path: Path) -> Path:
    """`path`, or its nearest parent directory that exists."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
