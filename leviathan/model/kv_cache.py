"""Batched generation with a materialized input table and a key-value cache.

A batch is padded on the left, so the newest token of every row is in the last column. Padding is
masked, and positions are counted from the first token of each row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from leviathan.config.embeddings.untied import UntiedConfig
from leviathan.model.embeddings.untied import UntiedEmbedding
from leviathan.model.transformer import Attention, Block, CausalLM, meta_model, rotary, rotate

OnToken = Callable[[int, int], bool]  # (row, new id) → whether the row continues


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: softmax temperature; 0 selects the most likely token.
        top_p: samples from the most likely tokens that together reach this probability.
        seed: seed of row 0; row i uses `seed + i`, independent of its batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def with_materialized_embedding(model: CausalLM) -> CausalLM:
    """Returns the model with a materialized input table; all other parameters are shared.

    A model that already has a table is returned unchanged.
    """
    if isinstance(model.model.embed_tokens, UntiedEmbedding):
        return model
    config = model.config.model_copy(update={"embedding": UntiedConfig()})
    twin = meta_model(config)
    state = {
        name: value
        for name, value in model.state_dict().items()
        if not name.startswith("model.embed_tokens.")
    }
    state["model.embed_tokens.weight"] = model.model.embed_tokens.materialize()
    twin.load_state_dict(state, assign=True)
    return twin.train(model.training).requires_grad_(False)


@torch.no_grad()
def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    end: int,
    on_token: OnToken,
    sampling: Sampling | None = None,
    first_row: int = 0,
) -> None:
    """Continues prompts in one batch and passes each new id to `on_token` immediately.

    Args:
        model: a model with any input embedding.
        prompts: token ids, at least one per prompt; only the last `seq_len` are used.
        new_tokens: maximum new tokens per row. A row that fills the context continues from its last
            half; callers that use `leviathan.evaluate.generate.fit_prompt` avoid this.
        end: the id that ends a row; it is not passed to `on_token`.
        on_token: called with (row, id); returning False ends the row.
        sampling: sampling parameters; default: greedy.
        first_row: number of the first row, which determines its random numbers.
    """
    how = sampling or Sampling()
    rows = list(range(len(prompts)))
    draws = [torch.Generator().manual_seed(how.seed + first_row + row) for row in rows]
    decoding = DecodeState(with_materialized_embedding(model), prompts)
    for _ in range(new_tokens):
        uniform = torch.tensor([float(torch.rand((), generator=draws[row])) for row in rows])
        chosen = pick(decoding.logits(), how, uniform)
        tokens = chosen.tolist()
        going = [
            place
            for place, (row, token) in enumerate(zip(rows, tokens, strict=True))
            if token != end and on_token(row, token)
        ]
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            decoding.keep(going)
            chosen = chosen[going]
        decoding.append(chosen)


def pick(logits: Tensor, how: Sampling, uniform: Tensor) -> Tensor:
    """Samples the next ids `[B]` from logits `[B, V]`, given uniform numbers in [0, 1) `[B]`."""
    if how.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / how.temperature).softmax(-1)
    uniform = uniform.to(logits.device).unsqueeze(1)
    if how.top_p >= 1:
        mass = probabilities.cumsum(-1)
        return _search(mass, uniform * mass[:, -1:])
    ordered, ids = probabilities.sort(dim=-1, descending=True)
    mass = ordered.cumsum(-1)
    kept = torch.where(mass - ordered < how.top_p, ordered, 0).cumsum(-1)
    return ids.gather(1, _search(kept, uniform * kept[:, -1:]).unsqueeze(1)).squeeze(1)


def _search(mass: Tensor, at: Tensor) -> Tensor:
    found = torch.searchsorted(mass, at, right=True).squeeze(1)
    # Rounding could select a token without probability.
    last = torch.searchsorted(mass, mass[:, -1:].contiguous()).squeeze(1)
    return torch.minimum(found, last)


class DecodeState:
    """State of the rows that are being continued: tokens and key-value cache."""

    def __init__(self, model: CausalLM, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.config = model, model.config
        self.device = model.lm_head.weight.device
        embedding = model.model.embed_tokens
        assert isinstance(embedding, UntiedEmbedding), "materialize first"
        self.table = embedding.weight
        self.head = model.lm_head.weight[
            : self.config.vocab_size
        ]  # a view without the padding rows
        self.layers = [cast(Block, layer) for layer in model.model.layers]
        cos, sin = rotary(self.config.seq_len, self.config, self.device)
        self.cos, self.sin = cos.to(self.table.dtype), sin.to(self.table.dtype)
        self._start([list(prompt) for prompt in prompts])

    def logits(self) -> Tensor:
        """Logits of the next token of each row, `[B, V]` fp32, without the padding ids."""
        return F.linear(self.last, self.head).float()

    def append(self, tokens: Tensor) -> None:
        """Appends one id `[B]` to each row."""
        for row, token in zip(self.ids, tokens.tolist(), strict=True):
            row.append(token)
        if self.length == self.config.seq_len:
            # A row that fits into the context is not truncated.
            half = max(1, self.config.seq_len // 2)
            self._start(
                [row if len(row) <= self.config.seq_len else row[-half:] for row in self.ids]
            )
            return
        at = self.length
        if self.padding is None:
            cos, sin, mask = self.cos[at : at + 1], self.sin[at : at + 1], None
        else:
            places = (at - self.padding).view(-1, 1)  # [B, 1]
            cos, sin = self.cos[places].unsqueeze(1), self.sin[places].unsqueeze(1)
            mask = (self.columns[: at + 1] >= self.padding.view(-1, 1))[:, None, None]
        self.last = self._forward(tokens.view(-1, 1), cos, sin, mask, causal=False)

    def keep(self, places: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.ids = [self.ids[place] for place in places]
        index = torch.tensor(places, device=self.device)
        self.caches = [cache.index_select(1, index) for cache in self.caches]
        self.last = self.last[index]
        if self.padding is not None:
            self.padding = self.padding[index]

    def _start(self, rows: list[list[int]]) -> None:
        """Processes the rows from their beginning."""
        self.ids = [row[-self.config.seq_len :] for row in rows]
        lengths = [len(row) for row in self.ids]
        longest, batch = max(lengths), len(rows)
        self.columns = torch.arange(self.config.seq_len, device=self.device)
        ids = torch.tensor(
            [[0] * (longest - len(row)) + row for row in self.ids], device=self.device
        )
        width = self.config.d_model // self.config.n_heads
        shape = (2, batch, self.config.n_kv_heads, self.config.seq_len, width)
        self.caches = [self.table.new_empty(shape) for _ in self.layers]
        self.length, self.padding, mask = 0, None, None
        cos, sin = self.cos[:longest], self.sin[:longest]
        if min(lengths) < longest:
            self.padding = longest - torch.tensor(lengths, device=self.device)
            columns = self.columns[:longest]
            places = (columns - self.padding.view(-1, 1)).clamp(min=0)  # [B, T]
            cos, sin = self.cos[places].unsqueeze(1), self.sin[places].unsqueeze(1)
            seen = columns >= self.padding.view(-1, 1, 1)  # [B, 1, T]
            before = columns.view(-1, 1) >= columns
            # A padding position attends to itself: a softmax over nothing would be NaN.
            mask = (before & seen | (columns.view(-1, 1) == columns)).unsqueeze(1)
        self.last = self._forward(ids, cos, sin, mask, causal=mask is None)

    def _forward(
        self, ids: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """New ids `[B, T]` → final state of the last one `[B, D]`; extends the cache by T."""
        x = F.embedding(ids, self.table)
        start, self.length = self.length, self.length + ids.shape[1]
        for layer, cache in zip(self.layers, self.caches, strict=True):
            h = layer.input_layernorm(x)
            attention = layer.self_attn
            q, k, v = _heads(attention, h)
            cache[0, :, :, start : self.length] = rotate(k, cos, sin)
            cache[1, :, :, start : self.length] = v
            keys, values = cache[:, :, :, : self.length]
            mixed = F.scaled_dot_product_attention(
                rotate(q, cos, sin),
                keys,
                values,
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=attention.grouped,
            )
            x = x + attention.o_proj(mixed.transpose(1, 2).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.model.norm(x[:, -1])


def _heads(attention: Attention, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[B, heads, T, width]`."""
    q, k, v = (
        proj(h).unflatten(-1, (-1, attention.width)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return q, k, v
