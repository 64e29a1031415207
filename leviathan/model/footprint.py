"""Memory of one rank in training, part by part and in closed form: nothing is allocated.

What an engine holds follows from its rules (ZeRO, arXiv 1910.02054, section 5; PyTorch's
fully_shard), how tensor parallelism cuts from the modules' own `tp_plan()`. Weights, gradients and
moments are exact but for padding of a few rows; activations are those that the blocks' operations
save for the backward pass with a flash attention; what allocators and CUDA add is not in.
"""

from dataclasses import dataclass, fields
from functools import cache
from math import prod
from typing import Literal

import torch

from leviathan.config.schema import EngineConfig, ModelConfig, RunConfig
from leviathan.errors import ConfigError
from leviathan.model.head import CHUNK_LOGITS
from leviathan.model.shards import Shard
from leviathan.model.transformer import CausalLM

FP32, BF16 = 4, 2
BUCKET = 500_000_000  # elements: DeepSpeed's default reduce and gather buckets
LIVE = 1_000_000_000  # elements: what ZeRO-3 lets stay gathered


@dataclass(frozen=True)
class Layout:
    """How a run lies on its ranks.

    Attributes:
        world_size: ranks.
        tp: tensor-parallel ranks, which share a batch.
        kind: the engine.
        zero_stage: of DeepSpeed, 0–3.
        replicas: of FSDP2; each is cut over dp / replicas ranks.
        micro_batch_size: sequences a forward pass.
        bf16: compute in bf16 with fp32 masters; else all is fp32.
        recompute: activation checkpointing of the blocks.
    """

    world_size: int
    tp: int = 1
    kind: Literal["deepspeed", "fsdp2"] = "deepspeed"
    zero_stage: int = 1
    replicas: int = 1
    micro_batch_size: int = 1
    bf16: bool = True
    recompute: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.tp

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the optimizer's state is cut."""
        if self.kind == "fsdp2":
            return self.dp // self.replicas
        return self.dp if self.zero_stage else 1

    @property
    def compute_bytes(self) -> int:
        """Bytes of one value in the forward pass."""
        return BF16 if self.bf16 else FP32

    @property
    def name(self) -> str:
        """The engine as people call it."""
        if self.kind == "deepspeed":
            return f"ZeRO-{self.zero_stage}"
        return "FSDP2" if self.replicas == 1 else f"HSDP, {self.replicas} replicas"


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """What a run configuration says, on so many ranks.

    Raises:
        ConfigError: the ranks cannot be cut this way.
    """
    engine, tp = config.engine, config.parallel.tp
    assert isinstance(engine, EngineConfig)
    replicas = getattr(engine, "replicas", 1)
    if world_size % tp or (world_size // tp) % replicas:
        raise ConfigError(
            f"{world_size} ranks cannot be cut by parallel.tp={tp} and engine.replicas={replicas}"
        )
    return Layout(
        world_size=world_size,
        tp=tp,
        kind=engine.kind,
        zero_stage=getattr(engine, "zero_stage", 0),
        replicas=replicas,
        micro_batch_size=config.train.micro_batch_size,
        bf16=engine.precision == "bf16",
        recompute=engine.activation_checkpointing,
    )


@dataclass(frozen=True)
class Sizes:
    """Parameters that a tensor-parallel rank has, as numbers of values."""

    block: int  # of one of the blocks
    blocks: int  # of all
    embedding: int  # of an input embedding of its own; 0 where it is tied
    rest: int  # head (or the tied table) and final norm
    whole: int  # of all these, those that every tensor-parallel rank has entire

    @property
    def total(self) -> int:
        """All of them."""
        return self.blocks + self.embedding + self.rest


def sizes(config: ModelConfig, tp: int) -> Sizes:
    """The parameters of a rank among `tp`, from the modules' own plans.

    Raises:
        ConfigError: tp does not divide what it would cut.
    """
    return _sizes(config.model_dump_json(), tp)


@cache
def _sizes(text: str, tp: int) -> Sizes:
    config = ModelConfig.model_validate_json(text)
    with torch.device("meta"):
        model = CausalLM(config)
    cut = {}
    for path, module in model.named_modules():
        plan = getattr(module, "tp_plan", dict)()
        cut |= {f"{path}.{name}": how.dim for name, how in plan.items() if isinstance(how, Shard)}
    counts = {"block": 0, "embedding": 0, "rest": 0}
    whole = 0
    own_head = not model.lm_head.tied
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if (dim := cut.get(name)) is not None:
            if shape[dim] % tp:
                raise ConfigError(f"parallel.tp={tp} does not divide dimension {dim} of {name}")
            shape[dim] //= tp
        else:
            whole += parameter.numel()
        if name.startswith("model.layers."):
            counts["block"] += prod(shape) if name.startswith("model.layers.0.") else 0
        elif name.startswith("model.embed_tokens.") and own_head:
            counts["embedding"] += prod(shape)
        else:
            counts["rest"] += prod(shape)
    if config.n_kv_heads % tp:
        raise ConfigError(f"parallel.tp={tp} does not divide n_kv_heads={config.n_kv_heads}")
    block = counts["block"]
    return Sizes(block, block * config.n_layers, counts["embedding"], counts["rest"], whole)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, at the most in a step.

    Attributes:
        weights: what the forward pass reads, and fp32 masters where they are another copy.
        gradients: between the backward pass and the optimizer.
        moments: AdamW's two, fp32.
        activations: saved for the backward pass of one micro-batch.
        loss: logits of a chunk, and the gradients that the head forms in the forward pass.
        communication: gathered weights and buckets on their way.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    loss: int
    communication: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))


def memory(config: ModelConfig, layout: Layout) -> Memory:
    """Bytes of one rank.

    Raises:
        ConfigError: tp does not divide what it would cut.
    """
    size = sizes(config, layout.tp)
    of_engine = _fsdp2 if layout.kind == "fsdp2" else _deepspeed
    weights, gradients, communication = of_engine(size, layout)
    return Memory(
        weights=weights,
        gradients=gradients,
        moments=2 * FP32 * -(-size.total // layout.shards),
        activations=_activations(config, layout),
        loss=_loss(config, layout),
        communication=communication,
    )


def _fsdp2(size: Sizes, layout: Layout) -> tuple[int, int, int]:
    """fp32 shards of both; the head's group and two blocks (one ahead) are gathered at a time.

    A group's gradient is whole in the compute dtype, and once more in fp32 while it is reduced.
    """
    mine = FP32 * -(-size.total // layout.shards)
    if layout.shards == 1:
        return mine, mine, 0
    gathered = layout.compute_bytes * (size.rest + 2 * size.block)
    largest = max(size.rest, size.embedding, size.block)
    return mine, mine, gathered + (layout.compute_bytes + FP32) * largest


def _deepspeed(size: Sizes, layout: Layout) -> tuple[int, int, int]:
    """ZeRO's stages; partitioned masters are a copy of their own, in fp32 as well."""
    n, part, stage = size.total, -(-size.total // layout.shards), layout.zero_stage
    low, bucket = layout.compute_bytes, FP32 * min(n, BUCKET)
    if stage == 0:
        masters = FP32 * n if layout.bf16 else 0
        flat = FP32 * n if layout.bf16 else 0
        return low * n + masters, low * n + flat, bucket
    if stage == 3:
        return (low + FP32) * part, FP32 * part, low * min(n, LIVE) + bucket
    gradients = low * n + FP32 * part if stage == 1 else FP32 * part
    return low * n + FP32 * part, gradients, bucket + low * min(n, BUCKET)


def _activations(config: ModelConfig, layout: Layout) -> int:
    """Saved by the blocks of one micro-batch, and the hidden states before and after them."""
    tokens = layout.micro_batch_size * config.seq_len
    d, kv = config.d_model, config.n_kv_heads * (config.d_model // config.n_heads)
    # Cut over tp: q, k, v; attention's output; gate, up, silu(gate) and the product of both.
    cut = (2 * d + 2 * kv + 4 * config.d_ff) // layout.tp
    whole = 4 * d  # the inputs of both norms and what they give
    kept = config.n_layers * (d if layout.recompute else whole + cut)
    at_once = whole + cut if layout.recompute else 0
    return layout.compute_bytes * tokens * (kept + at_once + 2 * d)


def _loss(config: ModelConfig, layout: Layout) -> int:
    """See `leviathan.model.head`: one chunk of logits, and both gradients until the backward."""
    tokens, rows = layout.micro_batch_size * config.seq_len, config.padded_vocab_size // layout.tp
    logits = min(tokens, max(1, CHUNK_LOGITS // rows)) * rows
    low = layout.compute_bytes
    chunk = logits * (low + FP32 + low if layout.bf16 else FP32)
    table = rows * config.d_model * (FP32 + low if layout.bf16 else FP32)
    return chunk + table + low * tokens * config.d_model
