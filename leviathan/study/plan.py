"""What a study will cost, before anything starts."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from leviathan.config.schema import RunConfig
from leviathan.config.study import MachineConfig
from leviathan.console import as_text
from leviathan.errors import ConfigError
from leviathan.model.accounting import account
from leviathan.model.footprint import layout_of
from leviathan.model.memory import memory
from leviathan.study.expand import Study, StudyRun

_SUMMED = ("tokens", "flops", "device_hours")


def plan_study(study: Study) -> dict[str, Any]:
    """Runs, tokens, FLOPs, memory and device-hours of a study, whole and still to do.

    Returns:
        `runs` (one record each), `total`, `left` (of the runs that are not complete), and the
        machine that the hours are reckoned for.
    """
    machine = study.config.machine
    runs = [_plan_run(run, machine) for run in study.runs]
    return {
        "study": str(study.path),
        "title": study.config.title,
        "question": study.config.question,
        "out": str(study.config.out),
        "machine": asdict_of(machine),
        "runs": runs,
        "total": _sum(runs),
        "left": _sum([run for run in runs if not run["complete"]]),
    }


def asdict_of(machine: MachineConfig) -> dict[str, Any]:
    """The machine as JSON values."""
    return machine.model_dump(mode="json")


def plan_table(plan: dict[str, Any]) -> str:
    """The plan as people read it."""
    machine, total, left = plan["machine"], plan["total"], plan["left"]
    table = Table()
    heads = ("run", "parameters", "steps", "tokens", "per parameter", "FLOPs", "GB", "hours", "")
    for head in heads:
        table.add_column(head, justify="left" if head in ("run", "") else "right")
    group = None
    for run in plan["runs"]:
        if group is not None and run["group"] != group:
            table.add_section()
        group = run["group"]
        table.add_row(
            run["name"],
            f"{run['parameters']['total']:,}",
            f"{run['steps']:,}",
            _count(run["tokens"]),
            f"{run['tokens_per_parameter']:.3g}",
            f"{run['flops']:.2e}",
            f"{run['device_bytes'] / 1e9:.3g}" if run["device_bytes"] else "",
            _hours(run["device_hours"]),
            "complete" if run["complete"] else "",
        )
    lines = [f"{plan['title']}: {plan['question']}", as_text(table)]
    lines.append(
        f"{total['runs']} runs, {_count(total['tokens'])} tokens, {total['flops']:.2e} FLOPs: "
        f"{_hours(total['device_hours'])} device-hours of {machine['name']} at "
        f"{100 * machine['mfu']:.0f} % of {machine['peak_tflops']:g} TFLOP/s, "
        f"{_hours(total['device_hours'] / machine['devices'])} hours on {machine['devices']}, "
        "one run after the other. Evaluation is not in."
    )
    lines.append(
        f"GB: of one of {machine['devices']} devices at its fullest, as `leviathan check` says. "
        "FLOPs: forward and backward, as `leviathan params` counts."
    )
    if left["runs"] < total["runs"]:
        lines.append(f"Left: {left['runs']} runs, {_hours(left['device_hours'])} device-hours.")
    return "\n".join(lines)


def _plan_run(run: StudyRun, machine: MachineConfig) -> dict[str, Any]:
    config, size = run.config, account(run.config.model)
    tokens = config.train.steps * config.train.global_batch_size * config.model.seq_len
    flops = tokens * size.flops_per_token
    return run.record | {
        "parameters": {
            key: value
            for key, value in asdict(size).items()
            if key in ("total", "input_embedding", "output_head", "body")
        },
        "steps": config.train.steps,
        "tokens": tokens,
        "tokens_per_parameter": tokens / size.total,
        "flops_per_token": size.flops_per_token,
        "flops": flops,
        "state_bytes": size.training_bytes,
        "device_bytes": _device_bytes(config, machine.devices),
        "device_hours": flops / (machine.mfu * machine.peak_tflops * 1e12) / 3600,
        "complete": run.is_complete,
    }


def _device_bytes(config: RunConfig, devices: int) -> int | None:
    """Of one device at its fullest; None where the run cannot be cut over so many."""
    try:
        return memory(config.model, layout_of(config, devices)).total
    except ConfigError:
        return None


def _sum(runs: list[dict[str, Any]]) -> dict[str, Any]:
    largest = max((run["state_bytes"] for run in runs), default=0)
    sums = {key: sum(run[key] for run in runs) for key in _SUMMED}
    return {"runs": len(runs), **sums, "largest_state_bytes": largest}


def _count(number: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.0f}"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"
