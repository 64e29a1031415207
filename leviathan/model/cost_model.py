"""Many accelerators on paper: bytes on the wire, the share of a step they take, the best layout.

Every figure is a bound under stated assumptions, not a measurement: rings (an all-reduce of B bytes
over r ranks sends 2·B·(r-1)/r from each, an all-gather or reduce-scatter half of it), the stated
bandwidths reached, one stated utilisation, and nothing of the communication hidden behind work.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leviathan.config.schema import ModelConfig
from leviathan.errors import ConfigError
from leviathan.model.memory import Memory, memory
from leviathan.model.model_stats import count_params
from leviathan.model.parallel_layout import FP32, ParallelLayout, sizes

USABLE_MEMORY = 0.9  # of an accelerator's memory: the rest is the allocator's and the driver's
SAME_SPEED_FACTOR = 1.03  # steps that differ by less than this factor are equally fast on paper


@dataclass(frozen=True)
class Hardware:
    """The stated machine; defaults are an H100 or H200 node with 400 Gb/s a GPU.

    Attributes:
        ranks_per_node: accelerators that share the fast links.
        memory_bytes: of one accelerator.
        flops: peak of one accelerator, FLOP/s in the compute dtype.
        mfu: the share of it that a step without communication reaches.
        intra: bytes/s from each accelerator within its node, one direction.
        inter: bytes/s from each accelerator to other nodes, one direction.
    """

    ranks_per_node: int = 8
    memory_bytes: float = 80e9
    flops: float = 989e12
    mfu: float = 0.4
    intra: float = 450e9
    inter: float = 50e9


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step.

    Attributes:
        tensor: between tensor-parallel ranks: activations.
        shard: weights gathered and gradients scattered over the ranks that hold one copy.
        replicate: gradients summed over copies.
    """

    tensor: float
    shard: float
    replicate: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.tensor + self.shard + self.replicate


@dataclass(frozen=True)
class Estimate:
    """A layout, and what it costs.

    Attributes:
        global_batch_size: sequences a step.
        micro_batches: forward passes a step.
        compute_s: of a step, without communication.
        communication_s: of a step, if nothing of it is hidden.
        scales_from: sequences a step at which both are equal: with fewer, ranks wait more than they
            work, and further ones hardly help. None: they do at any batch.
        fits: whether the memory suffices.
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
        """Nothing hidden."""
        return self.compute_s + self.communication_s

    @property
    def communication_share(self) -> float:
        """Of the step, if nothing is hidden."""
        return self.communication_s / self.step_s


def traffic(config: ModelConfig, layout: ParallelLayout, micro_batches: int) -> Traffic:
    """What one rank sends in a step of so many micro-batches."""
    size, low, shards = sizes(config, layout.tp), layout.compute_bytes, layout.shards
    n, hidden = size.total, low * layout.micro_batch_size * config.seq_len * config.d_model
    # Each block enters and leaves its cut work twice, forward and backward; recomputing leaves it
    # twice more. The head is entered once. Gradients of what is whole are summed once a step.
    sums = config.n_layers * (6 if layout.recompute else 4) + 1
    tensor = micro_batches * (sums * _all_reduce(hidden, layout.tp) + _rows(config, hidden, layout))
    tensor += _all_reduce(FP32 * size.whole / shards, layout.tp)
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
    """Bytes each rank sends to gather or scatter `size` bytes over `ranks`."""
    return size * (ranks - 1) / ranks


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * _ring(size, ranks)


def _rows(config: ModelConfig, hidden: float, layout: ParallelLayout) -> float:
    """What the input embedding sends forward, as if all ids of a micro-batch were distinct."""
    embedding = config.embedding
    mode = getattr(embedding, "tp_mode", None)
    if mode == "ids":
        return _ring(hidden, layout.tp)
    cut = mode == "heads" or embedding.kind in ("tied", "untied")
    return _all_reduce(hidden, layout.tp) if cut else 0.0


def estimate(
    config: ModelConfig, layout: ParallelLayout, global_batch_size: int, hardware: Hardware
) -> Estimate:
    """What a step costs.

    Raises:
        ConfigError: the batch is too small for the data-parallel ranks, or tp does not divide.
    """
    if global_batch_size < layout.dp:
        raise ConfigError(
            "parallel.batch_too_small",
            f"{global_batch_size} sequences a step cannot be spread over {layout.dp} data-parallel "
            f"ranks: raise the batch to {layout.dp}, or tp",
        )
    rows = -(-global_batch_size // layout.dp)
    micro_batches = -(-rows // layout.micro_batch_size)
    sent = traffic(config, layout, micro_batches)
    # The slowest rank has `rows` of them; recomputing is one more forward pass of three parts.
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
    """How long one rank takes to send it, one thing after the other."""
    # Ranks are numbered with tp innermost, then the shards of a copy, then the copies.
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
    """Sequences a step at which work and communication take equally long; None: at no batch.

    rows · per_row = once + rows / micro_batch_size · each, solved for a rank's rows.
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
    """The layout with the shortest step that fits; of equally fast ones the simplest.

    Simpler is: less tp, then an earlier ZeRO stage before FSDP2 and HSDP, no recomputing, and a
    larger micro-batch.

    Args:
        config: the model.
        world_size: accelerators.
        global_batch_size: sequences a step.
        hardware: the stated machine.
        bf16: compute dtype; else fp32.
        tp: the only one to consider, if given.

    Raises:
        ConfigError: nothing fits, or the batch is too small for any layout.
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
