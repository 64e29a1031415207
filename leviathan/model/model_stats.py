"""Parameters, FLOPs and memory of a model, in closed form: nothing is built."""

from dataclasses import dataclass

from leviathan.config.embedding import Match
from leviathan.config.schema import ModelConfig
from leviathan.model.embedding import KINDS

# An fp32 weight, its gradient and AdamW's two moments.
TRAINING_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class ModelStats:
    """What a model has and costs. Parameters are numbers of values, FLOPs are per token.

    FLOPs follow one convention: a multiply-add is 2, and a training step is the forward pass and
    twice as much backward, so 6 per multiply-add. Matrix products, attention over a full context
    of `seq_len` (the causal mask is not counted as a saving) and the output head over the padded
    vocabulary are in; norms, activations, softmax and look-ups are not. The input embedding is
    counted as if every token's vector were generated, not amortised over the distinct ids of a
    batch: an upper bound.

    Attributes:
        kind: of the input embedding.
        total: all parameters; a shared table counts once.
        input_embedding: of them, in the input embedding (the shared table of `tied` is here).
        output_head: of them, in an output head of its own (none where it is tied).
        body: of them, in the blocks and the final norm.
        flops_per_token: forward and backward, everything.
        input_embedding_flops_per_token: of them, for the input embedding.
        attention_flops_per_token: of them, for the products of attention (not its projections).
        output_head_flops_per_token: of them, for the vocabulary logits.
        weight_bytes: all parameters in fp32.
        training_bytes: fp32 weights, gradients and both AdamW moments, before any sharding and
            without activations.
        matching: how near a matched kind's free width brings it to its target; else None.
    """

    kind: str
    total: int
    input_embedding: int
    output_head: int
    body: int
    flops_per_token: int
    input_embedding_flops_per_token: int
    attention_flops_per_token: int
    output_head_flops_per_token: int
    weight_bytes: int
    training_bytes: int
    matching: Match | None

    @property
    def six_n_flops_per_token(self) -> int:
        """The other convention: 6 for each parameter of the blocks' matrices and of the head.

        Neither attention's products nor the generation of input vectors are in it. Source: arXiv
        2001.08361, section 2.1, with the head, whose product is real work.
        """
        others = self.attention_flops_per_token + self.input_embedding_flops_per_token
        return self.flops_per_token - others


def count_params(config: ModelConfig) -> ModelStats:
    """Counts what `config` describes; equal to the built model's `numel`."""
    kind = KINDS[config.embedding.kind]
    table = config.padded_vocab_size * config.d_model
    products = config.n_layers * block_products(config)
    norms = (2 * config.n_layers + 1) * config.d_model
    input_embedding = kind.param_count(config)
    output_head = 0 if config.embedding.kind == "tied" else table
    total = input_embedding + output_head + products + norms

    # Scores and their weighted sum: two products of T × D per token and layer.
    attention = 6 * config.n_layers * 2 * config.seq_len * config.d_model
    generation = 6 * kind.multiply_adds(config)
    return ModelStats(
        kind=config.embedding.kind,
        total=total,
        input_embedding=input_embedding,
        output_head=output_head,
        body=products + norms,
        flops_per_token=6 * (products + table) + attention + generation,
        input_embedding_flops_per_token=generation,
        attention_flops_per_token=attention,
        output_head_flops_per_token=6 * table,
        weight_bytes=4 * total,
        training_bytes=TRAINING_BYTES_PER_PARAMETER * total,
        matching=config.embedding.match(config.padded_vocab_size, config.d_model),
    )


def block_products(config: ModelConfig) -> int:
    """Parameters of one block's matrices (16·D² with the defaults), each used once a token."""
    d, width = config.d_model, config.d_model // config.n_heads
    attention = 2 * d * d + 2 * d * config.n_kv_heads * width
    return attention + 3 * d * config.d_ff
