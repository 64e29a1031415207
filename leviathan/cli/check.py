"""`leviathan check`."""

from pathlib import Path
from typing import Annotated

import typer

from leviathan.cli.options import AsJson, Config, Overrides, show


def check(
    config: Config,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks. Default: the slots of the hostfile, or 1."),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Hostfile with lines `name slots=N`. Each host is checked over ssh."),
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="Launcher: deepspeed, torchrun or slurm.")
    ] = "deepspeed",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Master port on the first host. Default: 29500 with a hostfile, else a free port.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to train on: a100, a100-40, h100, h200, b200 or cpu. Default: the GPU of "
            "this machine, or h100."
        ),
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(min=0, help="Memory per device in GB. Default: the data sheet's."),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            min=0, help="Dense bf16 peak per device in TFLOP/s. Default: the data sheet's."
        ),
    ] = None,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="Assumed model FLOPs utilization (MFU).")
    ] = 0.4,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 8,
    verify_data: Annotated[
        bool,
        typer.Option(
            "--verify-data", help="Verify the hashes of all shards (reads the complete dataset)."
        ),
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Measure two steps, a save and the bandwidth on the ranks of this launch.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Checks a run before it is launched.

    Checks the configuration, model, ranks, memory per rank, time, dataset and tokenizer, run
    directory, disk space for checkpoints, hosts, port, shared memory and the launcher's command.
    Each check ends with ok, warning or error; with an error the exit status is 2. Without --probe,
    nothing is trained and no GPU is used.

    Example: `leviathan check configs/run/pile_400m.yaml --world-size 8 --device h200`

    Example: `leviathan check RUN.yaml --hostfile hostfile --json`

    Example: `torchrun --nproc-per-node 8 -m leviathan check RUN.yaml --probe`
    """
    from leviathan.config.load import load_config
    from leviathan.config.run import RunConfig
    from leviathan.errors import ConfigError
    from leviathan.launch import commands as launching
    from leviathan.launch.hosts import read_hostfile
    from leviathan.preflight.checks import table

    loaded = load_config(config, overrides or [], RunConfig)
    if probe:
        from leviathan.preflight.probe import probe as run

        report = run(loaded)
    else:
        from leviathan.preflight.check import CheckOptions
        from leviathan.preflight.check import check as look

        if launcher not in launching.LAUNCHERS:
            known = ", ".join(launching.LAUNCHERS)
            raise ConfigError(
                "cli.invalid_option",
                f"--launcher {launcher}: unknown launcher. Expected one of {known}.",
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
        options = CheckOptions(
            request, world, device, memory_gb, peak_tflops, mfu, ranks_per_node, verify_data
        )
        report = look(loaded, options)
    show(report.as_dict(), as_json, table)
    if report.level == "error":
        raise typer.Exit(2)
