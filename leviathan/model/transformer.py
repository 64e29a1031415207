"""The language model: an input embedding, a Llama decoder, and an output head with the loss.

Parameter names are those of Hugging Face's Llama, so that export renames nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings import build_embedding
from leviathan.model.head import LMHead, Output, TokenScores
from leviathan.model.tp_layout import NO_TP, Shard, TPPlan


def rotary(length: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[T, head width]` in fp32 for rotary position embeddings (rotate-half).

    Recomputed in each forward pass: a buffer would be rounded to bf16 with the model, and lost if a
    model is built on the meta device. Source: arXiv 2104.09864, eq. 34.
    """
    width = config.d_model // config.n_heads
    powers = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    inverse = 1.0 / config.rope_theta**powers
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies `rotary` to queries or keys `[B, heads, T, head width]`."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings and grouped key-value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.d_model // config.n_heads
        self.grouped = config.n_kv_heads != config.n_heads
        self.tp = NO_TP
        self.q_proj = nn.Linear(config.d_model, config.n_heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.n_kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.n_kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.n_heads * self.width, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, T, D] → [B, T, D]`."""
        x = self.tp.copy_to_tp(x)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.width)).transpose(1, 2)  # [B, heads, T, width]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.tp.reduce_from_tp(self.o_proj(mixed.transpose(1, 2).flatten(-2)))

    def param_roles(self) -> Mapping[str, Role]:
        """Role of each of the module's own parameters."""
        return {f"{name}_proj.weight": "matrix" for name in "qkvo"}

    def tp_layout(self) -> TPPlan:
        """Each rank has some of the heads."""
        columns = {f"{name}_proj.weight": Shard(0) for name in "qkv"}
        return {**columns, "o_proj.weight": Shard(1)}


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.tp = NO_TP

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D] → [B, T, D]`."""
        x = self.tp.copy_to_tp(x)
        return self.tp.reduce_from_tp(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))

    def param_roles(self) -> Mapping[str, Role]:
        """Role of each of the module's own parameters."""
        return {f"{name}_proj.weight": "matrix" for name in ("gate", "up", "down")}

    def tp_layout(self) -> TPPlan:
        """Each rank has some of the hidden units."""
        rows = {f"{name}_proj.weight": Shard(0) for name in ("gate", "up")}
        return {**rows, "down_proj.weight": Shard(1)}


class Block(nn.Module):
    """Attention and MLP, each with a pre-norm and a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, T, D] → [B, T, D]`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def param_roles(self) -> Mapping[str, Role]:
        """Role of each of the module's own parameters."""
        return {"input_layernorm.weight": "gain", "post_attention_layernorm.weight": "gain"}


class Decoder(nn.Module):
    """Token ids to final hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = build_embedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)

    def forward(
        self, input_ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """`[B, T]` int64 → `[B, T, D]`, normalized."""
        x = self.embed_tokens(input_ids, unique_ids, inverse)
        cos, sin = (t.to(x.dtype) for t in rotary(input_ids.shape[1], self.config, x.device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def param_roles(self) -> Mapping[str, Role]:
        """Role of each of the module's own parameters."""
        return {"norm.weight": "gain"}


class CausalLM(nn.Module):
    """The complete model, uninitialized until `init_weights` or the loading of a checkpoint.

    `unique_ids` `[U]` and `inverse` `[B, T]` (`unique_ids[inverse] == input_ids`) are the distinct
    ids of the batch if the loader provides them; otherwise, the model computes them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = LMHead(config, self.model.embed_tokens.output_weight)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        unique_ids: Tensor | None = None,
        inverse: Tensor | None = None,
        output: Output = "loss",
    ) -> Tensor | TokenScores:
        """The training loss, or another `output` of `LMHead.forward`.

        Args:
            input_ids: `[B, T]` int64.
            targets: `[B, T]` int64, `IGNORE` for excluded positions.
            unique_ids: see the class.
            inverse: see the class.
            output: "loss", "scores" or "logits".

        Returns:
            For "loss", the sum of NLL over the targets in nats, an fp32 scalar.

        Raises:
            IndexError: a token id outside the vocabulary.
        """
        return self.lm_head(self.model(input_ids, unique_ids, inverse), targets, output)

    @torch.no_grad()
    def score(
        self,
        input_ids: Tensor,
        targets: Tensor,
        unique_ids: Tensor | None = None,
        inverse: Tensor | None = None,
    ) -> TokenScores:
        """NLL and greedy correctness per target, without gradient; logits in chunks."""
        return self(input_ids, targets, unique_ids, inverse, output="scores")

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """`[B, T]` → `[B, T, padded V]` fp32, without gradient; -inf in the padding."""
        return self(input_ids, output="logits")

    def hidden(
        self, input_ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """Final hidden states `[B, T, D]`, the input of the head."""
        return self.model(input_ids, unique_ids, inverse)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keeps a tied head tied if `fn` creates new parameters (leaving the meta device)."""
        super()._apply(fn, recurse)
        if self.lm_head.tied:
            weight = self.model.embed_tokens.output_weight
            assert weight is not None
            self.lm_head.weight = weight
        return self


def meta_model(config: ModelConfig) -> CausalLM:
    """A model on the meta device: parameter names and shapes without values."""
    with torch.device("meta"):
        return CausalLM(config)
