"""`leviathan launch`."""

from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import Config, MemorySnapshot, Overrides, Profile


def launch(
    config: Config,
    overrides: Overrides = None,
    launcher: Annotated[
        str, typer.Option(help="Launcher: deepspeed, torchrun or slurm.")
    ] = "deepspeed",
    hostfile: Annotated[
        Path | None, typer.Option(help="Hostfile: lines `name slots=N`. Default: this machine.")
    ] = None,
    remote: Annotated[
        str,
        typer.Option(
            help="Remote shell of the DeepSpeed launcher: pdsh or ssh. torchrun always uses ssh."
        ),
    ] = "pdsh",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks per node without a hostfile. Default: one per GPU."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes to request from Slurm.")] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Maximum restarts on the surviving nodes after a rank is lost (torchrun only).",
        ),
    ] = 0,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Master port on the first host. Default: 29500 with a hostfile, else a free port.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Run `leviathan check --probe` on the ranks instead of training."
        ),
    ] = False,
    profile: Profile = None,
    memory_snapshot: MemorySnapshot = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands without running them.")
    ] = False,
) -> None:
    """Launches `leviathan train` on one or more nodes.

    Checks the configuration and the hostfile first. SIGTERM or SIGUSR1 to any rank (or to this
    command, with `--remote ssh` or torchrun and a hostfile) saves a checkpoint and ends the run.
    The same command resumes it.

    Example: `leviathan launch RUN.yaml --hostfile hostfile --dry-run`
    """
    from leviathan.config.load import load_config
    from leviathan.config.plan import RunPlan
    from leviathan.config.run import RunConfig
    from leviathan.errors import ConfigError
    from leviathan.launch import commands as launching
    from leviathan.launch.hosts import read_hostfile
    from leviathan.launch.start import run_everywhere, run_here

    loaded = load_config(config, overrides or [], RunConfig)
    if launcher not in launching.LAUNCHERS:
        known = ", ".join(launching.LAUNCHERS)
        raise ConfigError("cli.invalid_option", f"--launcher {launcher}: expected one of {known}")
    if remote not in ("pdsh", "ssh"):
        raise ConfigError("cli.invalid_option", f"--remote {remote}: expected pdsh or ssh")
    if profile or memory_snapshot:
        from leviathan.train.profiler import parse_profile  # imports torch

        parse_profile(profile, memory_snapshot, loaded.train.steps)
    if probe and (profile or memory_snapshot):
        raise ConfigError(
            "cli.conflicting_options",
            "--probe does not train and cannot be combined with --profile",
        )
    options = ["--profile", profile] if profile else []
    options += ["--memory-snapshot"] if memory_snapshot else []
    options += ["--probe"] if probe else []
    request = launching.Request(
        arguments=(str(config), *(overrides or []), *options),
        launcher=launcher,
        hostfile=hostfile,
        hosts=tuple(read_hostfile(hostfile)) if hostfile else (),
        remote=remote,
        nodes=nodes,
        ranks=ranks,
        max_restarts=max_restarts,
        port=port,
    )
    if world := launching.world_size(request):
        RunPlan(loaded, world)  # raises if the ranks are not divisible
    found = launching.commands(request)
    if dry_run:
        print(launching.as_shell_lines(request, found))
    elif found[0].host is None:
        run_here(found[0])
    else:
        grace_period_s = loaded.parallel.heartbeat_timeout_s + 30
        raise typer.Exit(run_everywhere(found, request.elastic, grace_period_s))
