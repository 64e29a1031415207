"""`leviathan params`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leviathan.cli.options import AsJson, Config, Overrides, lines, show
from leviathan.config.load import read_config, validate
from leviathan.config.run import ModelFile, OptimConfig, RunConfig

if TYPE_CHECKING:
    from leviathan.estimate.cost_model import Estimate


def params(
    config: Config,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; shows memory, traffic and layout.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples per step. Default: the run's, or 512 for a model configuration."
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel degree to consider. Default: all.")
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 8,
    memory_gb: Annotated[float, typer.Option(min=0, help="Memory per accelerator in GB.")] = 80,
    peak_tflops: Annotated[
        float, typer.Option(min=0, help="Dense peak per accelerator in TFLOP/s.")
    ] = 989,
    mfu: Annotated[
        float,
        typer.Option(
            min=0.01, max=1, help="Assumed model FLOPs utilization without communication."
        ),
    ] = 0.4,
    intra_gbs: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth per rank within a node, in GB/s.")
    ] = 450,
    inter_gbs: Annotated[
        float, typer.Option(min=0.001, help="Bandwidth per rank between nodes, in GB/s.")
    ] = 50,
    groups: Annotated[
        bool,
        typer.Option(
            "--groups", help="Show the parameter groups: learning rate, weight decay and clipping."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Counts parameters by part, FLOPs per token and memory of a model or run configuration.

    With --world-size, also estimates memory per rank, communication, the recommended layout, and
    the batch size below which more accelerators hardly help.

    Example: `leviathan params configs/model/400m.yaml model.embedding.kind=tied`

    Example: `leviathan params configs/run/pile_1.2b.yaml --world-size 64`

    Example: `leviathan params configs/run/pile_400m.yaml --groups optim.weight_decay=0.1`
    """
    data, origins = read_config(config, overrides or [])
    schema: type[ModelFile | RunConfig] = RunConfig if set(data) - {"model"} else ModelFile
    loaded = validate(data, schema, str(config), origins)
    from leviathan.estimate.params import count_params

    counted = asdict(count_params(loaded.model))
    if groups:
        optim = loaded.optim if isinstance(loaded, RunConfig) else OptimConfig()
        from leviathan.train.run_dir import model_groups

        show({"groups": model_groups(loaded.model, optim)}, as_json, _groups_table)
        return
    if world_size is None:
        show(counted, as_json)
        return
    from leviathan.console import say
    from leviathan.estimate.cost_model import Hardware, estimate, recommend
    from leviathan.estimate.layout import parallel_layout

    hardware = Hardware(
        ranks_per_node, memory_gb * 1e9, peak_tflops * 1e12, mfu, intra_gbs * 1e9, inter_gbs * 1e9
    )
    run = loaded if isinstance(loaded, RunConfig) else None
    batch = global_batch or (run.train.global_batch_size if run else 512)
    bf16 = run is None or run.engine.precision == "bf16"
    found = {}
    if run:
        layout = parallel_layout(run, world_size)
        if batch >= layout.dp:
            found["as configured"] = estimate(loaded.model, layout, batch, hardware)
        else:
            say(f"warning: {batch:,} samples per step are too few for {layout.dp:,} ranks.")
    found["recommended"] = recommend(loaded.model, world_size, batch, hardware, bf16, tp)
    result = {
        "params": counted,
        "hardware": asdict(hardware),
        "layouts": {name: _as_dict(each) for name, each in found.items()},
    }

    def as_text(_: dict[str, Any]) -> str:
        return f"{lines(counted)}\n\n{_tables(found, batch * loaded.model.seq_len, result)}"

    show(result, as_json, as_text)


def _groups_table(result: dict[str, Any]) -> str:
    from rich.table import Table

    from leviathan.console import as_text

    table = Table(title="Parameter groups", title_justify="left")
    for column in ("group", "role"):
        table.add_column(column)
    for column in ("tensors", "parameters", "peak lr", "weight decay", "betas", "clip"):
        table.add_column(column, justify="right")
    for row in result["groups"]:
        table.add_row(
            row["selector"],
            row["role"],
            f"{row['tensors']:,}",
            f"{row['parameters']:,}",
            f"{row['lr']:g}",
            f"{row['weight_decay']:g}",
            ", ".join(f"{beta:g}" for beta in row["betas"]),
            f"{row['clip']:g} {row['clipped']}",
        )
    return as_text(table)


def _as_dict(each: "Estimate") -> dict[str, Any]:
    return {
        **asdict(each),
        "engine": each.layout.name,
        "dp": each.layout.dp,
        "memory": {**each.memory.by_part, "total": each.memory.total},
        "memory_moment": each.memory.moment,
        "traffic": {**asdict(each.traffic), "total": each.traffic.total},
        "step_s": each.step_s,
        "communication_share": each.communication_share,
    }


def _tables(found: dict[str, "Estimate"], tokens: int, result: dict[str, Any]) -> str:
    """Both layouts side by side."""
    from rich.table import Table

    from leviathan.console import as_text

    table = Table(title="A rank and a step", title_justify="left")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")

    def row(label: str, cell: Any) -> None:
        table.add_row(label, *(cell(each) for each in found.values()))

    row("engine", lambda e: e.layout.name)
    row("dp × tp", lambda e: f"{e.layout.dp:,} × {e.layout.tp}")
    row("micro-batch, and how many", lambda e: f"{e.layout.micro_batch_size} × {e.micro_batches}")
    row("activations recomputed", lambda e: "yes" if e.layout.recompute else "no")
    table.add_section()
    for part in next(iter(found.values())).memory.by_part:
        row(f"{part}, GB", lambda e, part=part: f"{e.memory.by_part[part] / 1e9:.2f}")
    row("memory, GB", lambda e: f"{e.memory.total / 1e9:.2f}{'' if e.fits else '  does not fit'}")
    table.add_section()
    for part in ("tensor", "shard", "replicate"):
        row(f"sent, {part}, GB", lambda e, part=part: f"{getattr(e.traffic, part) / 1e9:.2f}")
    row("work, ms", lambda e: f"{e.compute_s * 1e3:.1f}")
    row("communication, ms", lambda e: f"{e.communication_s * 1e3:.1f}")
    row("its share of the step", lambda e: f"{e.communication_share:.1%}")
    row("tokens/s", lambda e: f"{tokens / e.step_s:,.0f}")
    row("scales from, sequences", lambda e: f"{e.scales_from:,}" if e.scales_from else "none")
    machine = result["hardware"]
    caption = (
        f"Assumed: {machine['flops'] / 1e12:g} TFLOP/s × {machine['mfu']:g} MFU, "
        f"{machine['memory_bytes'] / 1e9:g} GB, {machine['ranks_per_node']} a node, "
        f"{machine['intra'] / 1e9:g} GB/s inside, {machine['inter'] / 1e9:g} GB/s between; "
        "no communication hidden behind work."
    )
    return as_text(table, caption)
