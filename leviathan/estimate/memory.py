"""Closed-form memory of one training rank by category; nothing is allocated.

The state of an engine follows from its rules (ZeRO, arXiv 1910.02054, section 5; PyTorch's
fully_shard). The peak of a step occurs at one of a few moments; each is summed up, and the maximum
is reported. Activations are those that the operations of the blocks save for the backward pass,
with flash attention. Overhead of allocators, CUDA and NCCL is not included.
`tests/distributed/test_memory_real.py` compares the estimate with the tensors of small real runs.
"""

from dataclasses import dataclass, fields, replace

from leviathan.config.embeddings.leviathan import LeviathanConfig
from leviathan.config.run import ModelConfig
from leviathan.estimate.layout import FP32, ParallelLayout, Sizes, reduce_bucket, sizes
from leviathan.model import CHUNK_LOGITS

LIVE = 1_000_000_000  # elements: parameters smaller than this stay gathered in ZeRO-3
LEV_BLOCK = 8192  # ids per block of the fused kernels
LEV_BUFFERS = 8  # buffers of size ids × heads × d_seed in the backward pass


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step.

    Attributes:
        weights: weights of the forward pass, and fp32 masters if they are a separate copy.
        gradients: gradients of this and previous micro-batches.
        moments: the two moments of AdamW, fp32.
        activations: activations saved for the backward pass of one micro-batch.
        logits: logits of a chunk, and the gradients that the head computes in the forward pass.
        workspace: buffers of the input embedding in its backward pass.
        communication: gathered weights and communication buckets.
        moment: name of the moment of the peak.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    workspace: int
    communication: int
    moment: str

    @property
    def by_part(self) -> dict[str, int]:
        """All categories by name, without the moment."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.by_part.values())


@dataclass(frozen=True)
class _Held:
    """Memory of an engine in addition to the moments: constant, and at the moments of a step."""

    weights: int
    kept: int  # gradients during the forward pass of a micro-batch
    formed: int  # gradients at the end of the backward pass
    head: int  # communication at the head
    begin: int  # communication at the start of the backward pass
    end: int  # communication at the end of the backward pass


def memory(config: ModelConfig, layout: ParallelLayout) -> Memory:
    """Estimates the peak memory of one rank.

    Raises:
        ConfigError: tp does not divide a dimension that it shards.
    """
    size = sizes(config, layout.tp)
    held = (_fsdp2 if layout.engine == "fsdp2" else _deepspeed)(config, size, layout)
    saved, again = _activations(config, layout)
    table, hidden = _table(config, layout), _hidden(config, layout)
    head = Memory(
        weights=held.weights,
        gradients=held.kept,
        moments=2 * FP32 * -(-size.total // layout.shards),
        activations=saved,
        logits=_logits(config, layout),
        workspace=0,
        communication=held.head,
        moment="at the head",
    )
    begin = replace(
        head,
        logits=2 * (table + hidden),  # as saved, and multiplied by the gradient of the loss
        communication=held.begin,
        moment="at the start of the backward pass",
    )
    block = replace(
        begin,
        activations=saved + again,
        logits=table + hidden,
        moment="while a block is recomputed",
    )
    end = replace(
        head,
        gradients=held.formed,
        activations=0,
        logits=0,
        workspace=_workspace(config, layout),
        communication=held.end,
        moment="at the end of the backward pass",
    )
    return max(head, begin, block, end, key=lambda each: each.total)


def _fsdp2(config: ModelConfig, size: Sizes, layout: ParallelLayout) -> _Held:
    """FSDP2: fp32 shards of everything; the head and one or two blocks are gathered.

    The gradient of a group exists unsharded in the compute dtype, and again in fp32 while it is
    reduced; that of the last group stays until the next reduction.
    """
    low, mine = layout.compute_bytes, FP32 * -(-size.total // layout.shards)
    last = FP32 * (size.embedding or size.rest) if layout.accumulates else 0
    blocks = 0 if layout.shards == 1 else low * size.block  # on one rank, nothing is copied
    largest = max(size.rest, size.embedding)
    reduced = FP32 * (largest + -(-largest // layout.shards))
    sums = 2 * _table(config, layout) if config.embedding.kind == "tied" else 0
    return _Held(
        weights=mine,
        kept=mine if layout.accumulates else 0,
        formed=mine if layout.accumulates else 0,
        head=low * size.rest + blocks + last,
        begin=low * size.rest + 3 * blocks + last,
        end=2 * low * (size.rest + size.embedding) + max(reduced, sums),
    )


def _deepspeed(config: ModelConfig, size: Sizes, layout: ParallelLayout) -> _Held:
    """ZeRO stages; partitioned masters are a separate copy, also in fp32.

    Gradients are reduced in one bucket. A rank keeps those of its partition, but a parameter that
    spans two partitions is kept complete by both.
    """
    n, part, stage = size.total, -(-size.total // layout.shards), layout.zero_stage
    low, bf16, again = layout.compute_bytes, layout.bf16, layout.accumulates
    bucket = low * (layout.bucket or reduce_bucket(config))
    # in addition to existing gradients: the head's, a look-up's, and their sum
    copies = (2 if config.embedding.kind == "tied" else 0) + again
    sums = copies * _table(config, layout)
    if stage == 0:
        masters = FP32 * n if bf16 else 0
        kept = (low * n if again else 0) + masters
        return _Held(low * n + masters, kept, low * n + masters, 0, 0, max(sums, bucket))
    weights = low * n + FP32 * part
    if stage == 1:
        summed = FP32 * n if bf16 else 0
        kept, waiting = (low * n if again and not bf16 else 0) + summed, bucket if again else 0
        formed = low * n + summed
        return _Held(weights, kept, formed, waiting, bucket, bucket + max(sums, FP32 * part))
    largest = max(part, _table(config, layout) // low)
    if stage == 2:
        kept = FP32 * largest if again else 0
        return _Held(weights, kept, FP32 * largest, 0, bucket, bucket + sums)
    gathered = low * min(n, LIVE)
    return _Held(
        weights=(low + FP32) * part,
        kept=FP32 * part,
        formed=FP32 * part,
        head=bucket + gathered,
        begin=bucket + gathered,
        end=bucket + gathered + sums,
    )


def _hidden(config: ModelConfig, layout: ParallelLayout) -> int:
    """One hidden state of a micro-batch."""
    return layout.compute_bytes * layout.micro_batch_size * config.seq_len * config.d_model


def _table(config: ModelConfig, layout: ParallelLayout) -> int:
    """Weight of the head in the compute dtype."""
    return layout.compute_bytes * config.padded_vocab_size // layout.tp * config.d_model


def _activations(config: ModelConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Activations of the blocks and the final norm; activations of a recomputed block."""
    tokens, low = layout.micro_batch_size * config.seq_len, layout.compute_bytes
    d, kv = config.d_model, config.n_kv_heads * (config.d_model // config.n_heads)
    # A fused norm saves its input. On the CPU, the norm consists of several operations in fp32.
    norm = low * d if layout.device == "cuda" else 2 * FP32 * d
    # Sharded by tp: q, k, v, the attention output and its fp32 row sums; gate, up, silu(gate) and
    # their product.
    cut = (low * (2 * d + 2 * kv + 4 * config.d_ff) + FP32 * config.n_heads) // layout.tp
    block = 2 * (norm + low * d) + cut
    ends = norm + low * d
    if not layout.recompute:
        return tokens * (config.n_layers * block + ends), 0
    # In the backward pass: two gradients as wide as the MLP.
    moving = 2 * low * config.d_ff // layout.tp
    return tokens * (config.n_layers * low * d + ends), tokens * (block - low * d + moving)


def _logits(config: ModelConfig, layout: ParallelLayout) -> int:
    """One chunk of logits, and both gradients until the backward pass; see `model.head`."""
    tokens, rows = layout.micro_batch_size * config.seq_len, config.padded_vocab_size // layout.tp
    chunk = min(tokens, max(1, CHUNK_LOGITS // rows))
    logits, low = chunk * rows, layout.compute_bytes
    table, hidden = rows * config.d_model, _hidden(config, layout)
    passing = low * chunk * config.d_model  # gradient of the hidden states of the chunk
    if not layout.bf16:
        return FP32 * (logits + table) + hidden + passing
    # In bf16: logits and their gradient in both dtypes; or it and a table gradient in both.
    return FP32 * table + hidden + 2 * low * logits + max(FP32 * logits, low * table + passing)


def _workspace(config: ModelConfig, layout: ParallelLayout) -> int:
    """Memory of a generated embedding for a micro-batch, if all of its ids are distinct."""
    kind, low = config.embedding, layout.compute_bytes
    ids = min(layout.micro_batch_size * config.seq_len, config.vocab_size)
    rows = low * ids * config.d_model
    if isinstance(kind, LeviathanConfig):
        block = min(ids, LEV_BLOCK)
        return 2 * rows + LEV_BUFFERS * FP32 * block * kind.heads * kind.d_seed
    return rows + 3 * low * ids * (getattr(kind, "hidden", None) or 0)
