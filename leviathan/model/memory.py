"""Memory of one rank in training, part by part and in closed form: nothing is allocated.

What an engine holds follows from its rules (ZeRO, arXiv 1910.02054, section 5; PyTorch's
fully_shard). A step is fullest at one of a few moments; each is added up, and the fullest counts.
Activations are those that the blocks' operations save for the backward pass with a flash attention.
What allocators, CUDA and NCCL add is not in. `tests/distributed/test_memory_real.py` holds all this
against the tensors that small runs really have.
"""

from dataclasses import dataclass, fields, replace

from leviathan.config.embedding import LeviathanConfig
from leviathan.config.schema import ModelConfig
from leviathan.model.head import CHUNK_LOGITS
from leviathan.model.parallel_layout import FP32, ParallelLayout, Sizes, reduce_bucket, sizes

LIVE = 1_000_000_000  # elements: what ZeRO-3 lets stay gathered
LEV_BLOCK = 8192  # ids at a time of the fused kernels
LEV_BUFFERS = 8  # of the size ids × heads × d_seed, in the backward pass


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment of a step when they are most.

    Attributes:
        weights: what the forward pass reads, and fp32 masters where they are another copy.
        gradients: of micro-batches before, or of this one.
        moments: AdamW's two, fp32.
        activations: saved for the backward pass of one micro-batch.
        logits: of a chunk, and the gradients that the head forms in the forward pass.
        workspace: of the input embedding, while it is differentiated.
        communication: gathered weights and buckets on their way.
        moment: which it is.
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
        """All but the moment, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.by_part.values())


@dataclass(frozen=True)
class _Held:
    """What an engine has beside the moments, always and at the moments of a step."""

    weights: int
    kept: int  # gradients, while a micro-batch goes forward
    formed: int  # gradients, when the backward pass ends
    head: int  # communication, at the head
    begin: int  # communication, when the backward pass begins
    end: int  # communication, when it ends


def memory(config: ModelConfig, layout: ParallelLayout) -> Memory:
    """Bytes of one rank.

    Raises:
        ConfigError: tp does not divide what it would cut.
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
        logits=2 * (table + hidden),  # as they were saved, and times the loss's own gradient
        communication=held.begin,
        moment="as the backward pass begins",
    )
    block = replace(
        begin,
        activations=saved + again,
        logits=table + hidden,
        moment="while a block is computed again",
    )
    end = replace(
        head,
        gradients=held.formed,
        activations=0,
        logits=0,
        workspace=_workspace(config, layout),
        communication=held.end,
        moment="as the backward pass ends",
    )
    return max(head, begin, block, end, key=lambda each: each.total)


def _fsdp2(config: ModelConfig, size: Sizes, layout: ParallelLayout) -> _Held:
    """fp32 shards of all. The head's group is gathered throughout, of blocks one or two.

    A group's gradient is whole in the compute dtype, and once more in fp32 while it is reduced;
    that of the last group stays until the next reduction.
    """
    low, mine = layout.compute_bytes, FP32 * -(-size.total // layout.shards)
    last = FP32 * (size.embedding or size.rest) if layout.accumulates else 0
    blocks = 0 if layout.shards == 1 else low * size.block  # alone nothing is copied
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
    """ZeRO's stages; partitioned masters are a copy of their own, in fp32 as well.

    Gradients come in one bucket, whole; what a rank keeps of them is its part, but a parameter that
    lies across two parts is kept whole by both.
    """
    n, part, stage = size.total, -(-size.total // layout.shards), layout.zero_stage
    low, bf16, again = layout.compute_bytes, layout.bf16, layout.accumulates
    bucket = low * (layout.bucket or reduce_bucket(config))
    # Beside those that a parameter has already: the head's, a look-up's, and their sum.
    beside = (2 if config.embedding.kind == "tied" else 0) + again
    sums = beside * _table(config, layout)
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
    """The head's weight, in the compute dtype."""
    return layout.compute_bytes * config.padded_vocab_size // layout.tp * config.d_model


def _activations(config: ModelConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Saved by the blocks of one micro-batch and the norm after them; by a block computed again."""
    tokens, low = layout.micro_batch_size * config.seq_len, layout.compute_bytes
    d, kv = config.d_model, config.n_kv_heads * (config.d_model // config.n_heads)
    # A fused norm saves what it was given. On the CPU it is one of several operations, in fp32.
    norm = low * d if layout.device == "cuda" else 2 * FP32 * d
    # Cut over tp: q, k, v, attention's output and its fp32 row sums; gate, up, silu(gate) and the
    # product of both.
    cut = (low * (2 * d + 2 * kv + 4 * config.d_ff) + FP32 * config.n_heads) // layout.tp
    block = 2 * (norm + low * d) + cut
    ends = norm + low * d
    if not layout.recompute:
        return tokens * (config.n_layers * block + ends), 0
    # While it is differentiated: two gradients as wide as its MLP.
    moving = 2 * low * config.d_ff // layout.tp
    return tokens * (config.n_layers * low * d + ends), tokens * (block - low * d + moving)


def _logits(config: ModelConfig, layout: ParallelLayout) -> int:
    """See `leviathan.model.head`: one chunk of logits, and both gradients until the backward."""
    tokens, rows = layout.micro_batch_size * config.seq_len, config.padded_vocab_size // layout.tp
    chunk = min(tokens, max(1, CHUNK_LOGITS // rows))
    logits, low = chunk * rows, layout.compute_bytes
    table, hidden = rows * config.d_model, _hidden(config, layout)
    passing = low * chunk * config.d_model  # the chunk's gradient of the hidden states
    if not layout.bf16:
        return FP32 * (logits + table) + hidden + passing
    # In bf16, logits, and their slope in both dtypes; or the slope and a table's gradient in both.
    return FP32 * table + hidden + 2 * low * logits + max(FP32 * logits, low * table + passing)


def _workspace(config: ModelConfig, layout: ParallelLayout) -> int:
    """What a generated embedding holds of a micro-batch's distinct ids, as if all were."""
    kind, low = config.embedding, layout.compute_bytes
    ids = min(layout.micro_batch_size * config.seq_len, config.vocab_size)
    rows = low * ids * config.d_model
    if isinstance(kind, LeviathanConfig):
        block = min(ids, LEV_BLOCK)
        return 2 * rows + LEV_BUFFERS * FP32 * block * kind.heads * kind.d_seed
    return rows + 3 * low * ids * (getattr(kind, "hidden", None) or 0)
