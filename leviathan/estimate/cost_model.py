"""Analytic cost model for many accelerators: bytes sent, their share of a step, the best layout.

Every figure is a bound under stated assumptions, not a measurement: ring collectives (an all-reduce
of B bytes over r ranks sends 2·B·(r-1)/r from each rank, an all-gather or reduce-scatter half of
it) at the stated bandwidths, a fixed utilization, and no overlap of communication and computation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leviathan.config.run import ModelConfig
from leviathan.errors import ConfigError
from leviathan.estimate.layout import FP32, ParallelLayout, sizes
from leviathan.estimate.memory import Memory, memory
from leviathan.estimate.params import count_params

USABLE_MEMORY = (
    0.9  # share of the memory of an accelerator; the allocator and the driver use the rest
)
SAME_SPEED_FACTOR = 1.03  # steps that differ by less than this factor are considered equally fast


@dataclass(frozen=True)
class Hardware:
    """The assumed hardware; the defaults are an H100 or H200 node with 400 Gb/s per GPU.

    Attributes:
        ranks_per_node: accelerators per node, connected by `intra`.
        memory_bytes: memory of one accelerator.
        flops: peak FLOP/s of one accelerator in the compute dtype.
        mfu: share of `flops` that a step without communication reaches.
        intra: bandwidth of an accelerator within its node, bytes/s in one direction.
        inter: bandwidth of an accelerator to other nodes, bytes/s in one direction.
    """

    ranks_per_node: int = 8
    memory_bytes: float = 80e9
    flops: float = 989e12
    mfu: float = 0.4
    intra: float = 450e9
    inter: float = 50e9


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank per step.

    Attributes:
        tensor: activations, between tensor-parallel ranks.
        shard: gathered weights and scattered gradients, within a sharding group.
        replicate: gradients, summed over the replicas.
    """

    tensor: float
    shard: float
    replicate: float

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.tensor + self.shard + self.replicate


@dataclass(frozen=True)
class Estimate:
    """A layout and its cost.

    Attributes:
        global_batch_size: sequences per step.
        micro_batches: forward passes per step.
        compute_s: compute time of a step, seconds.
        communication_s: communication time of a step without overlap, seconds.
        scales_from: sequences per step at which both times are equal; with fewer, communication
            dominates and further ranks hardly help. None if it dominates at any batch size.
        fits: whether the memory is sufficient.
    """

    layout: ParallelLayout
    memory: Memory
    traffic: Traffic
    global_batch_size: int
    micro_batches: int
    compute_s: float
    communication_s: float
    scales_from: int | None
    fits: bool

    @property
    def step_s(self) -> float:
        """Seconds per step without overlap."""
        return self.compute_s + self.communication_s

    @property
    def communication_share(self) -> float:
        """Share of communication in the step, without overlap."""
        return self.communication_s / self.step_s


def traffic(config: ModelConfig, layout: ParallelLayout, micro_batches: int) -> Traffic:
    """Bytes sent by one rank in a step of `micro_batches` micro-batches."""
    size, low, shards = sizes(config, layout.tp), layout.compute_bytes, layout.shards
    n, hidden = size.total, low * layout.micro_batch_size * config.seq_len * config.d_model
    # Each block has two collectives in the forward pass and two in the backward pass;
    # recomputing adds two, the head one. Gradients of replicated weights are summed per step.
    sums = config.n_layers * (6 if layout.recompute else 4) + 1
    tensor = micro_batches * (sums * _all_reduce(hidden, layout.tp) + _rows(config, hidden, layout))
    tensor += _all_reduce(FP32 * size.replicated / shards, layout.tp)
    if layout.engine == "fsdp2":
        gathers = 2 * (n - size.rest) + size.rest  # blocks again in the backward pass
        shard = micro_batches * (_ring(low * gathers, shards) + _ring(FP32 * n, shards))
        return Traffic(tensor, shard, _all_reduce(FP32 * n / shards, layout.dp_replicate))
    stage, dp = layout.zero_stage, layout.dp
    if stage == 0:
        return Traffic(tensor, 0, _all_reduce(FP32 * n, dp))
    if stage == 3:
        return Traffic(tensor, micro_batches * (_ring(2 * low * n, dp) + _ring(FP32 * n, dp)), 0)
    reductions = micro_batches if stage == 2 else 1
    return Traffic(tensor, reductions * _ring(FP32 * n, dp) + _ring(low * n, dp), 0)


def _ring(size: float, ranks: int) -> float:
    """Bytes sent by each rank to gather or scatter `size` bytes over `ranks` ranks."""
    return size * (ranks - 1) / ranks


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * _ring(size, ranks)


def _rows(config: ModelConfig, hidden: float, layout: ParallelLayout) -> float:
    """Bytes of the input embedding in the forward pass, if all ids are distinct."""
    embedding = config.embedding
    mode = getattr(embedding, "tp_mode", None)
    if mode == "ids":
        return _ring(hidden, layout.tp)
    cut = mode == "heads" or embedding.kind in ("tied", "untied")
    return _all_reduce(hidden, layout.tp) if cut else 0.0


def estimate(
    config: ModelConfig, layout: ParallelLayout, global_batch_size: int, hardware: Hardware
) -> Estimate:
    """Estimates the cost of a step.

    Raises:
        ConfigError: the batch is too small for the data-parallel ranks, or tp does not divide.
    """
    if global_batch_size < layout.dp:
        raise ConfigError(
            "parallel.batch_too_small",
            f"{global_batch_size} sequences per step cannot be distributed over {layout.dp} "
            f"data-parallel ranks: raise the batch to {layout.dp}, or tp",
        )
    rows = -(-global_batch_size // layout.dp)
    micro_batches = -(-rows // layout.micro_batch_size)
    sent = traffic(config, layout, micro_batches)
    # The slowest rank has `rows` sequences. Recomputing adds one forward pass to three.
    work = (
        count_params(config).flops_per_token * config.seq_len * (4 / 3 if layout.recompute else 1)
    )
    per_row = work / layout.tp / (hardware.flops * hardware.mfu)
    held = memory(config, replace(layout, accumulates=micro_batches > 1))
    return Estimate(
        layout=layout,
        memory=held,
        traffic=sent,
        global_batch_size=global_batch_size,
        micro_batches=micro_batches,
        compute_s=rows * per_row,
        communication_s=seconds(sent, layout, hardware),
        scales_from=_break_even(config, layout, hardware, per_row),
        fits=held.total <= USABLE_MEMORY * hardware.memory_bytes,
    )


def seconds(sent: Traffic, layout: ParallelLayout, hardware: Hardware) -> float:
    """Seconds in which one rank sends these bytes, sequentially."""
    # Ranks are numbered with tp innermost, then the shards, then the replicas.
    reach = {"tensor": layout.tp, "shard": layout.tp * layout.shards}
    parts = {"tensor": sent.tensor, "shard": sent.shard, "replicate": sent.replicate}
    total = 0.0
    for part, size in parts.items():
        within = reach.get(part, layout.world_size) <= hardware.ranks_per_node
        total += size / (hardware.intra if within else hardware.inter)
    return total


def _break_even(
    config: ModelConfig, layout: ParallelLayout, hardware: Hardware, per_row: float
) -> int | None:
    """Sequences per step at which compute and communication take equally long; None if never.

    rows · per_row = once + rows / micro_batch_size · each, solved for the rows of a rank.
    """
    first, second = (seconds(traffic(config, layout, k), layout, hardware) for k in (1, 2))
    each = second - first
    once = first - each
    gain = per_row - each / layout.micro_batch_size
    if gain <= 0:
        return None
    return layout.dp * max(1, round(once / gain))


def recommend(
    config: ModelConfig,
    world_size: int,
    global_batch_size: int,
    hardware: Hardware,
    bf16: bool = True,
    tp: int | None = None,
) -> Estimate:
    """The layout with the shortest step that fits into memory; the simplest of equally fast ones.

    Layouts are ordered from simple to complex by: tp; ZeRO stage, FSDP2, HSDP; recomputing; smaller
    micro-batch.

    Args:
        config: configuration of the model.
        world_size: number of accelerators.
        global_batch_size: sequences per step.
        hardware: assumed hardware.
        bf16: compute in bf16; else in fp32.
        tp: number of tensor-parallel ranks; default: every divisor is considered.

    Raises:
        ConfigError: no layout fits into memory, or the batch is too small for every layout.
    """
    found: list[Estimate] = []
    refusal = ""
    for layout in _layouts(world_size, global_batch_size, hardware, bf16, tp):
        try:
            found.append(estimate(config, layout, global_batch_size, hardware))
        except ConfigError as error:
            refusal = str(error)
    fitting = [each for each in found if each.fits]
    if not fitting:
        reason = refusal or "every layout needs more memory than an accelerator has"
        raise ConfigError(
            "parallel.indivisible",
            f"{world_size} accelerators, {global_batch_size} sequences: {reason}",
        )
    fastest = min(each.step_s for each in fitting)
    close = [each for each in fitting if each.step_s <= SAME_SPEED_FACTOR * fastest]
    return min(close, key=_complexity)


def _complexity(each: Estimate) -> tuple[int, int, int, bool, int]:
    layout = each.layout
    kind = layout.zero_stage if layout.engine == "deepspeed" else 4
    return layout.tp, kind, layout.dp_replicate, layout.recompute, -layout.micro_batch_size


def _layouts(
    world_size: int, global_batch_size: int, hardware: Hardware, bf16: bool, tp: int | None
) -> Iterator[ParallelLayout]:
    node = min(world_size, hardware.ranks_per_node)
    for ways in [tp] if tp else [n for n in (1, 2, 4, 8, 16) if n <= node]:
        if world_size % ways:
            continue
        dp = world_size // ways
        engines = [ParallelLayout(world_size, ways, "deepspeed", stage) for stage in (1, 2, 3)]
        engines += [ParallelLayout(world_size, ways, "fsdp2", 0)]
        nodes = world_size // node
        if nodes > 1 and world_size % node == 0 and dp % nodes == 0:
            engines.append(ParallelLayout(world_size, ways, "fsdp2", 0, dp_replicate=nodes))
        rows = max(1, -(-global_batch_size // dp))
        micro = 1
        while micro <= min(rows, 64):
            for engine in engines:
                for recompute in (False, True):
                    yield replace(engine, micro_batch_size=micro, bf16=bf16, recompute=recompute)
            micro *= 2
