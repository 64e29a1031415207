"""Everything that can be known before a launch, in one report."""

from dataclasses import dataclass

import psutil
import torch

from leviathan.checkpoint.layout import complete_checkpoints
from leviathan.config.schema import RunConfig
from leviathan.errors import ConfigError
from leviathan.launch import commands as launching
from leviathan.model.scale import Hardware
from leviathan.parallel.launch_env import machine_name
from leviathan.preflight import machine
from leviathan.preflight.data import check_data
from leviathan.preflight.report import Report
from leviathan.preflight.run import (
    Target,
    check_checkpoints,
    check_cost,
    check_first_weights,
    check_folder,
    check_memory,
    check_model,
    check_ranks,
)

# Memory in bytes and dense bf16 FLOP/s of one, by the vendor's data sheets.
DEVICES = {
    "a100": (80e9, 312e12),
    "a100-40": (40e9, 312e12),
    "h100": (80e9, 989e12),
    "h200": (141e9, 989e12),
    "b200": (180e9, 2250e12),
}
ASSUMED = "h100"


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the configuration; None: not said."""

    request: launching.Request
    world_size: int
    device: str | None = None
    memory_gb: float | None = None
    peak_tflops: float | None = None
    mfu: float = 0.4
    ranks_per_node: int = 8
    verify_data: bool = False


def check(config: RunConfig, asked: Asked) -> Report:
    """Looks at all of it; nothing is written but a remote dataset's small files."""
    report, world = Report(), asked.world_size
    report.figures["world_size"] = world
    report.say("configuration", "green", "every key and value is understood")
    with report.about("model"):
        check_model(report, config)
    with report.about("launch"):
        _check_launch(report, asked)
    target = find_target(asked)
    report.figures["device"] = target.name
    plan = None
    with report.about("ranks"):
        plan = check_ranks(report, config, world)
    if plan is not None:
        with report.about("memory"):
            check_memory(report, plan, target)
        with report.about("time"):
            check_cost(report, plan, target)
    info = check_data(report, config, asked.verify_data)
    with report.about("run folder"):
        check_folder(report, config, info)
    if info is not None:
        with report.about("checkpoints"):
            check_checkpoints(report, config, world)
    if config.init_from is not None and not complete_checkpoints(config.run_dir):
        with report.about("init_from"):
            check_first_weights(report, config)
    hosts, port = asked.request.hosts, asked.request.port
    if hosts:
        with report.about("hosts"):
            machine.check_hosts(report, hosts)
    if asked.request.launcher != "slurm":
        machine.check_port(report, port, hosts)
    machine.check_shared_memory(report)
    return report


def find_target(asked: Asked) -> Target:
    """The device that is named, or the one here, or one that is assumed.

    Raises:
        ConfigError: no such device is known.
    """
    name, assumed = asked.device, False
    room, peak = 0.0, 0.0
    if name is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        room = float(torch.cuda.get_device_properties(0).total_memory)
        peak = next((d[1] for known, d in DEVICES.items() if known in name.lower()), 0.0)
    elif name == "cpu":
        here = asked.request.ranks or asked.world_size
        room, name = psutil.virtual_memory().total / here, f"{machine_name()}, a share of it"
    else:
        assumed, name = name is None, name or ASSUMED
        if name not in DEVICES:
            known = ", ".join(["cpu", *DEVICES])
            raise ConfigError(
                "cli.invalid_option",
                f"--device {name}: not known; expected one of {known}, or say --memory-gb and "
                "--peak-tflops",
            )
        room, peak = DEVICES[name]
    room = asked.memory_gb * 1e9 if asked.memory_gb is not None else room
    peak = asked.peak_tflops * 1e12 if asked.peak_tflops is not None else peak
    hardware = Hardware(
        ranks_per_node=asked.ranks_per_node, memory_bytes=room, flops=peak, mfu=asked.mfu
    )
    where = "cpu" if asked.device == "cpu" else "cuda"
    return Target(name, where, hardware, assumed)


def _check_launch(report: Report, asked: Asked) -> None:
    """What the launcher would run; whether its ranks are as many as asked for."""
    request, world = asked.request, asked.world_size
    found = launching.commands(request)
    report.figures["commands"] = [str(command) for command in found]
    started = launching.world_size(request)
    if started is not None and started != world:
        raise ConfigError(
            "launch.wrong_ranks", f"starts {started} ranks, not {world}: mend the hostfile's slots"
        )
    local = 0 if request.hosts or request.launcher == "slurm" else world
    if (seen := torch.cuda.device_count()) and local > seen:
        raise ConfigError(
            "launch.too_few_gpus",
            f"{local} ranks here, but {seen} GPU(s): name the hosts in a --hostfile",
        )
    first = f"# on {found[0].host.name}: " if found[0].host else ""
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    report.say("launch", "green", f"{first}{found[0]}{more}")
