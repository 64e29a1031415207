"""Starting a run on many ranks and hosts."""

from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import Config, MemorySnapshot, Overrides, Profile


def launch(
    config: Config,
    overrides: Overrides = None,
    launcher: Annotated[str, typer.Option(help="deepspeed, torchrun or slurm.")] = "deepspeed",
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines of `name slots=N`; without one, this machine.")
    ] = None,
    remote: Annotated[
        str, typer.Option(help="How deepspeed reaches the hosts: pdsh or ssh; torchrun uses ssh.")
    ] = "pdsh",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks a machine, without a hostfile; else one a GPU.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that Slurm shall give.")] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="With torchrun: how often the ranks may be started anew after one is lost, on the "
            "hosts that are left (elastic).",
        ),
    ] = 0,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the first host.")] = 29500,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Run `leviathan check --probe` on the ranks, and no training."
        ),
    ] = False,
    profile: Profile = None,
    memory_snapshot: MemorySnapshot = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact commands and run nothing.")
    ] = False,
) -> None:
    """Starts `leviathan train` on the ranks of one machine or many.

    Checks configuration and hostfile first. SIGTERM or SIGUSR1 to any rank, or to this command with
    `--remote ssh` or torchrun's hostfile, saves and ends the run; the same command goes on.

    Example: `leviathan launch RUN.yaml --hostfile hostfile --dry-run`
    """
    from leviathan.config.load import load_config
    from leviathan.config.plan import RunPlan
    from leviathan.config.schema import RunConfig
    from leviathan.errors import ConfigError
    from leviathan.launch import commands as launching
    from leviathan.launch.hosts import read_hostfile
    from leviathan.launch.start import run_everywhere, run_here

    loaded = load_config(config, overrides or [], RunConfig)
    if launcher not in launching.LAUNCHERS:
        known = ", ".join(launching.LAUNCHERS)
        raise ConfigError(
            "cli.invalid_option", f"--launcher {launcher}: unknown; expected one of {known}"
        )
    if remote not in ("pdsh", "ssh"):
        raise ConfigError("cli.invalid_option", f"--remote {remote}: unknown; expected pdsh or ssh")
    if profile or memory_snapshot:
        from leviathan.train.profiling import parse_wish  # imports torch

        parse_wish(profile, memory_snapshot, loaded.train.steps)
    if probe and (profile or memory_snapshot):
        raise ConfigError(
            "cli.conflicting_options",
            "--probe trains nothing that could be profiled: leave one of them out",
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
        RunPlan(loaded, world)  # what cannot be cut this way is told here
    found = launching.commands(request)
    if dry_run:
        print(launching.shown(request, found))
    elif found[0].host is None:
        run_here(found[0])
    else:
        patience_s = loaded.parallel.lost_after_s + 30
        raise typer.Exit(run_everywhere(found, request.elastic, patience_s))
