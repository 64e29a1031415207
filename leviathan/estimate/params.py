"""Closed-form parameters, FLOPs and memory of a model; nothing is built."""

from dataclasses import dataclass

from leviathan.config.embeddings.base import Match
from leviathan.config.run import ModelConfig

# an fp32 weight, its gradient and the two moments of AdamW
TRAINING_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class ModelStats:
    """Number of parameters and cost of a model; FLOPs are per token.

    FLOPs follow one convention: a multiply-add counts as 2, and the backward pass as twice the
    forward pass, so a training step has 6 per multiply-add. Matrix products, attention over a full
    context of `seq_len` (without savings by the causal mask) and the output head over the padded
    vocabulary are included; norms, activations, softmax and look-ups are not. The input embedding
    is counted once per token instead of once per distinct id of a batch, which is an upper bound.

    Attributes:
        kind: kind of the input embedding.
        total: all parameters; a tied table counts once.
        input_embedding: parameters of the input embedding, including the table of `tied`.
        output_head: parameters of the output head; 0 if it is tied.
        body: parameters of the blocks and the final norm.
        flops_per_token: FLOPs of the forward and backward pass.
        input_embedding_flops_per_token: FLOPs of the input embedding.
        attention_flops_per_token: FLOPs of the attention products, without projections.
        output_head_flops_per_token: FLOPs of the vocabulary logits.
        weight_bytes: bytes of all parameters in fp32.
        training_bytes: bytes of fp32 weights, gradients and both AdamW moments, unsharded and
            without activations.
        matching: how closely the width of a matched kind reaches its target; else None.
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
        """The 6N convention: 6 per parameter of the matrices of the blocks and of the head.

        Excludes attention products and the generation of input vectors. Source: arXiv 2001.08361,
        section 2.1, with the head included.
        """
        others = self.attention_flops_per_token + self.input_embedding_flops_per_token
        return self.flops_per_token - others


def count_params(config: ModelConfig) -> ModelStats:
    """Computes the statistics of `config`; equal to `numel` of the built model."""
    embedding, vocabulary, d_model = config.embedding, config.padded_vocab_size, config.d_model
    table = vocabulary * d_model
    products = config.n_layers * block_products(config)
    norms = (2 * config.n_layers + 1) * d_model
    input_embedding = embedding.parameters(vocabulary, d_model)
    output_head = 0 if embedding.kind == "tied" else table
    total = input_embedding + output_head + products + norms

    # scores and their weighted sum: two products of T × D per token and layer
    attention = 6 * config.n_layers * 2 * config.seq_len * d_model
    generation = 6 * embedding.multiply_adds(d_model)
    return ModelStats(
        kind=embedding.kind,
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
        matching=embedding.match(vocabulary, d_model),
    )


def block_products(config: ModelConfig) -> int:
    """Number of parameters of the matrices of one block, each used once per token."""
    d, width = config.d_model, config.d_model // config.n_heads
    attention = 2 * d * d + 2 * d * config.n_kv_heads * width
    return attention + 3 * d * config.d_ff
