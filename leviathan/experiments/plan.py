"""The cost of an experiment before it starts."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from leviathan.config.experiment import MachineConfig
from leviathan.config.run import RunConfig
from leviathan.console import as_text
from leviathan.errors import ConfigError
from leviathan.estimate.layout import parallel_layout
from leviathan.estimate.memory import memory
from leviathan.estimate.params import count_params
from leviathan.experiments.expand import Experiment, ExperimentRun
from leviathan.formatting import format_count

_SUMMED = ("tokens", "flops", "device_hours")


def plan_experiment(experiment: Experiment) -> dict[str, Any]:
    """Runs, tokens, FLOPs, memory and device-hours of an experiment, in total and remaining.

    Returns:
        `runs` (one record each), `total`, `left` (of the runs that are not complete), and the
        hardware for which the hours are estimated.
    """
    machine = experiment.config.machine
    runs = [_plan_run(run, machine) for run in experiment.runs]
    return {
        "experiment": str(experiment.path),
        "title": experiment.config.title,
        "question": experiment.config.question,
        "out": str(experiment.config.out),
        "machine": asdict_of(machine),
        "runs": runs,
        "total": _sum(runs),
        "left": _sum([run for run in runs if not run["complete"]]),
    }


def asdict_of(machine: MachineConfig) -> dict[str, Any]:
    """The hardware as JSON values."""
    return machine.model_dump(mode="json")


def plan_table(plan: dict[str, Any]) -> str:
    """The plan as text."""
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
            format_count(run["tokens"]),
            f"{run['tokens_per_parameter']:.3g}",
            f"{run['flops']:.2e}",
            f"{run['device_bytes'] / 1e9:.3g}" if run["device_bytes"] else "",
            _hours(run["device_hours"]),
            "complete" if run["complete"] else "",
        )
    lines = [f"{plan['title']}: {plan['question']}", as_text(table)]
    lines.append(
        f"{total['runs']} runs, {format_count(total['tokens'])} tokens, {total['flops']:.2e} "
        f"FLOPs: {_hours(total['device_hours'])} device-hours of {machine['name']} at "
        f"{100 * machine['mfu']:.0f} % of {machine['peak_tflops']:g} TFLOP/s, "
        f"{_hours(total['device_hours'] / machine['devices'])} hours on {machine['devices']} "
        "if the runs are sequential. Evaluation is not included."
    )
    lines.append(
        "GB: peak memory per device, as estimated by `leviathan check`. "
        "FLOPs: forward and backward pass, as counted by `leviathan params`."
    )
    if left["runs"] < total["runs"]:
        lines.append(
            f"Remaining: {left['runs']} runs, {_hours(left['device_hours'])} device-hours."
        )
    return "\n".join(lines)


def _plan_run(run: ExperimentRun, machine: MachineConfig) -> dict[str, Any]:
    config, size = run.config, count_params(run.config.model)
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
    """Peak memory of one device; None if the run does not fit this number of devices."""
    try:
        return memory(config.model, parallel_layout(config, devices)).total
    except ConfigError:
        return None


def _sum(runs: list[dict[str, Any]]) -> dict[str, Any]:
    largest = max((run["state_bytes"] for run in runs), default=0)
    sums = {key: sum(run[key] for run in runs) for key in _SUMMED}
    return {"runs": len(runs), **sums, "largest_state_bytes": largest}


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"
