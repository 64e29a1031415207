"""Looking before a launch."""

from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import AsJson, Config, Overrides, show


def check(
    config: Config,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the run; else as the hostfile says, or 1.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines of `name slots=N`: each host is asked over ssh.")
    ] = None,
    launcher: Annotated[str, typer.Option(help="deepspeed, torchrun or slurm.")] = "deepspeed",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the first host, where the ranks meet.")
    ] = 29500,
    device: Annotated[
        str | None,
        typer.Option(
            help="What it shall run on: a100, a100-40, h100, h200, b200 or cpu. Else the GPU that "
            "is here, or h100."
        ),
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=0, help="Of one device, 10⁹ bytes; else as it is known.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0, help="Of one device, dense; else as it is known.")
    ] = None,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the peak that a step reaches.")
    ] = 0.4,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Devices a machine.")] = 8,
    verify_data: Annotated[
        bool, typer.Option("--verify-data", help="Hash every byte of the dataset: slow.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="On the ranks themselves (alone, or under a launcher): two steps, a save and a "
            "bandwidth test.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Says what a run will need and do, before anything is started.

    Looks at configuration, model, ranks, memory of a rank by part, time, dataset and tokenizer,
    the run folder, room for checkpoints, hosts, port, shared memory and the launcher's command.
    Each is green, amber (works, but look) or red (will not work): then the exit status is 2.
    Nothing is trained and no GPU is taken, but with --probe, which leaves nothing behind.

    Example: `leviathan check configs/run/pile_400m.yaml --world-size 8 --device h200`

    Example: `leviathan check RUN.yaml --hostfile hostfile --json`

    Example: `torchrun --nproc-per-node 8 -m leviathan check RUN.yaml --probe`
    """
    from leviathan.config.load import load_config
    from leviathan.config.schema import RunConfig
    from leviathan.errors import ConfigError
    from leviathan.launch import commands as launching
    from leviathan.launch.hosts import read_hostfile
    from leviathan.preflight.report import table

    loaded = load_config(config, overrides or [], RunConfig)
    if probe:
        from leviathan.preflight.probe import probe as run

        report = run(loaded)
    else:
        from leviathan.preflight.check import Asked
        from leviathan.preflight.check import check as look

        if launcher not in launching.LAUNCHERS:
            known = ", ".join(launching.LAUNCHERS)
            raise ConfigError(
                "cli.invalid_option", f"--launcher {launcher}: unknown; expected one of {known}"
            )
        hosts = tuple(read_hostfile(hostfile)) if hostfile else ()
        world = world_size or sum(host.slots for host in hosts) or 1
        nodes = -(-world // ranks_per_node) if launcher == "slurm" else 1
        request = launching.Request(
            arguments=(str(config), *(overrides or [])),
            launcher=launcher,
            hostfile=hostfile,
            hosts=hosts,
            nodes=nodes,
            ranks=None if hosts else -(-world // nodes),
            port=port,
        )
        asked = Asked(
            request, world, device, memory_gb, peak_tflops, mfu, ranks_per_node, verify_data
        )
        report = look(loaded, asked)
    show(report.as_dict(), as_json, table)
    if report.verdict == "red":
        raise typer.Exit(2)
