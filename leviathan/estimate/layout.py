"""Layout of a run over its ranks, and the parameters of each rank; the basis of `memory`.

All values are closed forms of the configuration; nothing is allocated.
"""

from dataclasses import dataclass
from typing import Literal

from leviathan.config.run import EngineConfig, ModelConfig, RunConfig
from leviathan.errors import ConfigError
from leviathan.estimate.params import block_products, count_params

FP32, BF16 = 4, 2
BUCKET = 500_000_000  # elements: DeepSpeed's default reduce and gather buckets

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of a run over its ranks.

    Attributes:
        world_size: number of ranks.
        tp: number of tensor-parallel ranks, which share a batch.
        kind: kind of the engine.
        zero_stage: ZeRO stage of DeepSpeed, 0–3.
        replicas: replicas of FSDP2; each is sharded over dp / replicas ranks.
        micro_batch_size: sequences per forward pass.
        bf16: compute in bf16 with fp32 masters; else all is fp32.
        recompute: activation checkpointing of the blocks.
        accumulates: whether a step has several micro-batches.
        device: device type.
        bucket: elements of DeepSpeed's gradient bucket; None: computed from the model.
    """

    world_size: int
    tp: int = 1
    engine: Literal["deepspeed", "fsdp2"] = "deepspeed"
    zero_stage: int = 1
    dp_replicate: int = 1
    micro_batch_size: int = 1
    bf16: bool = True
    recompute: bool = False
    accumulates: bool = True
    device: Device = "cuda"
    bucket: int | None = None

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // self.tp

    @property
    def shards(self) -> int:
        """Number of ranks over which one copy of the optimizer state is sharded."""
        if self.engine == "fsdp2":
            return self.dp // self.dp_replicate
        return self.dp if self.zero_stage else 1

    @property
    def compute_bytes(self) -> int:
        """Bytes of one value in the forward pass."""
        return BF16 if self.bf16 else FP32

    @property
    def name(self) -> str:
        """Readable name of the engine."""
        if self.engine == "deepspeed":
            return f"ZeRO-{self.zero_stage}"
        return "FSDP2" if self.dp_replicate == 1 else f"HSDP, {self.dp_replicate} replicas"


def parallel_layout(config: RunConfig, world_size: int, device: Device = "cuda") -> ParallelLayout:
    """Layout of a run configuration on `world_size` ranks.

    Raises:
        ConfigError: the number of ranks is not divisible as configured.
    """
    engine, tp = config.engine, config.parallel.tp
    assert isinstance(engine, EngineConfig)
    replicas = getattr(engine, "dp_replicate", 1)
    if world_size % tp or (world_size // tp) % replicas:
        raise ConfigError(
            "parallel.indivisible",
            f"{world_size} ranks are not divisible by parallel.tp={tp} and "
            f"engine.dp_replicate={replicas}",
        )
    dp, train = world_size // tp, config.train
    extra = getattr(engine, "extra", {}).get("zero_optimization", {})
    return ParallelLayout(
        world_size=world_size,
        tp=tp,
        engine=engine.kind,
        zero_stage=getattr(engine, "zero_stage", 0),
        dp_replicate=replicas,
        micro_batch_size=min(train.micro_batch_size, -(-train.global_batch_size // dp)),
        bf16=engine.precision == "bf16",
        recompute=engine.activation_checkpointing,
        accumulates=train.global_batch_size > dp * train.micro_batch_size,
        device=device,
        bucket=extra.get("reduce_bucket_size"),
    )


def reduce_bucket(config: ModelConfig) -> int:
    """Elements of DeepSpeed's gradient bucket: its default, at most the model."""
    return min(BUCKET, count_params(config).total)


@dataclass(frozen=True)
class Sizes:
    """Number of parameters of a tensor-parallel rank."""

    block: int  # one block
    blocks: int  # all blocks
    embedding: int  # a separate input embedding; 0 if tied
    rest: int  # head (or the tied table) and final norm
    replicated: int  # of all these, the replicated ones

    @property
    def total(self) -> int:
        """Total number of parameters."""
        return self.blocks + self.embedding + self.rest


def sizes(config: ModelConfig, tp: int) -> Sizes:
    """Number of parameters of each of `tp` ranks; equal to the layouts of the modules.

    Raises:
        ConfigError: tp does not divide a dimension that it shards.
    """
    for name, size in config.tp_dimensions().items():
        if size % tp:
            raise ConfigError(
                "parallel.indivisible", f"parallel.tp={tp} does not divide model.{name}={size}"
            )
    embedding, vocabulary, d_model = config.embedding, config.padded_vocab_size, config.d_model
    norms = 2 * d_model
    block = block_products(config) // tp + norms
    head = vocabulary * d_model // tp + d_model
    table = embedding.parameters(vocabulary, d_model)
    sharded = embedding.sharded_parameters(vocabulary, d_model)
    tied = embedding.kind == "tied"
    return Sizes(
        block=block,
        blocks=config.n_layers * block,
        embedding=0 if tied else table - sharded + sharded // tp,
        rest=head,
        replicated=config.n_layers * norms + d_model + (0 if tied else table - sharded),
    )
