"""Factorized embedding table of ALBERT."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embeddings.albert import AlbertConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import InputEmbedding, Normal


class AlbertEmbedding(InputEmbedding[AlbertConfig]):
    """E = table · projection, of rank E ≪ D.

    Parameters: table `[V, E]`; projection `[E, D]`. Source: ALBERT, arXiv 1909.11942, section 3.1.
    """

    linear_in = ("projection",)

    def __init__(self, model: ModelConfig, config: AlbertConfig) -> None:
        super().__init__(model, config)
        self.table = nn.Parameter(torch.empty(model.padded_vocab_size, config.free))
        self.projection = nn.Parameter(torch.empty(config.free, model.d_model))

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """The std of the backbone; `calibrate` then sets the scale of the output."""
        return {"table": Normal(model.init_std), "projection": Normal(model.init_std)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {"table": "table", "projection": "matrix"}

    def vectors(self, ids: Tensor) -> Tensor:
        """`[N] → [N, D]`."""
        return F.embedding(ids, self.table) @ self.projection

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """`[B, T] → [B, T, D]`, per token.

        Because E is small, the product costs less than scattering rows of width D back to the
        tokens, and their gradients to the distinct ids.
        """
        self._check(ids if unique_ids is None else unique_ids)
        return self.vectors(ids)
