"""The preflight checks: everything that can be verified before a launch."""

from dataclasses import dataclass

import psutil
import torch

from leviathan.checkpoint.layout import complete_checkpoints
from leviathan.config.run import RunConfig
from leviathan.errors import ConfigError
from leviathan.estimate.cost_model import Hardware
from leviathan.hardware import DEVICES, find_device
from leviathan.launch import commands as launching
from leviathan.parallel.launch_env import host_name
from leviathan.preflight import checks as node_checks
from leviathan.preflight.checks import (
    Report,
    Target,
    check_checkpoints,
    check_cost,
    check_data,
    check_first_weights,
    check_memory,
    check_model,
    check_ranks,
    check_run_dir,
)

ASSUMED = "h100"


@dataclass(frozen=True)
class CheckOptions:
    """Options of `leviathan check`; None: not given."""

    request: launching.Request
    world_size: int
    device: str | None = None
    memory_gb: float | None = None
    peak_tflops: float | None = None
    mfu: float = 0.4
    ranks_per_node: int = 8
    verify_data: bool = False


def check(config: RunConfig, options: CheckOptions) -> Report:
    """Runs all checks. Writes only the small files of a remote dataset."""
    report, world = Report(), options.world_size
    report.figures["world_size"] = world
    report.add("configuration", "ok", "all keys and values are valid")
    with report.catching("model"):
        check_model(report, config)
    with report.catching("launch"):
        _check_launch(report, options)
    target = find_target(options)
    report.figures["device"] = target.name
    plan = None
    with report.catching("ranks"):
        plan = check_ranks(report, config, world)
    if plan is not None:
        with report.catching("memory"):
            check_memory(report, plan, target)
        with report.catching("time"):
            check_cost(report, plan, target)
    info = check_data(report, config, options.verify_data)
    with report.catching("run_dir"):
        check_run_dir(report, config, info)
    if info is not None:
        with report.catching("checkpoints"):
            check_checkpoints(report, config, world)
    if config.init_from is not None and not complete_checkpoints(config.run_dir):
        with report.catching("init_from"):
            check_first_weights(report, config)
    hosts = options.request.hosts
    if hosts:
        with report.catching("hosts"):
            node_checks.check_hosts(report, hosts)
    if options.request.launcher != "slurm" and (hosts or options.request.port):
        node_checks.check_port(report, int(options.request.master_port), hosts)
    node_checks.check_shared_memory(report)
    return report


def find_target(options: CheckOptions) -> Target:
    """The device that is given, or the GPU of this machine, or else an assumed one.

    Raises:
        ConfigError: the device is unknown.
    """
    name, assumed = options.device, False
    room, peak = 0.0, 0.0
    if name is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        room = float(torch.cuda.get_device_properties(0).total_memory)
        device = find_device(name)
        peak = device.flops if device else 0.0
    elif name == "cpu":
        here = options.request.ranks or options.world_size
        room, name = psutil.virtual_memory().total / here, f"{host_name()}, shared by {here} ranks"
    else:
        assumed, name = name is None, name or ASSUMED
        if name not in DEVICES:
            known = ", ".join(["cpu", *DEVICES])
            raise ConfigError(
                "cli.invalid_option",
                f"--device {name}: unknown device. Expected one of {known}; for another device, "
                "use --memory-gb and --peak-tflops.",
            )
        room, peak = DEVICES[name].memory_bytes, DEVICES[name].flops
    room = options.memory_gb * 1e9 if options.memory_gb is not None else room
    peak = options.peak_tflops * 1e12 if options.peak_tflops is not None else peak
    hardware = Hardware(
        ranks_per_node=options.ranks_per_node, memory_bytes=room, flops=peak, mfu=options.mfu
    )
    where = "cpu" if options.device == "cpu" else "cuda"
    return Target(name, where, hardware, assumed)


def _check_launch(report: Report, options: CheckOptions) -> None:
    """Reports the launcher's command and checks its number of ranks."""
    request, world = options.request, options.world_size
    found = launching.commands(request)
    report.figures["commands"] = [str(command) for command in found]
    started = launching.world_size(request)
    if started is not None and started != world:
        raise ConfigError(
            "launch.wrong_ranks",
            f"the launcher starts {started} ranks, expected {world}. Correct the slots in the "
            "hostfile.",
        )
    local = 0 if request.hosts or request.launcher == "slurm" else world
    if (seen := torch.cuda.device_count()) and local > seen:
        raise ConfigError(
            "launch.too_few_gpus",
            f"{local} ranks on this machine, which has {seen} GPU(s). For several machines, use "
            "--hostfile.",
        )
    first = f"# on {found[0].host.name}: " if found[0].host else ""
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    report.add("launch", "ok", f"{first}{found[0]}{more}")
