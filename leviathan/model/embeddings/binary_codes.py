"""An input embedding without parameters: the bits of the token id."""

from collections.abc import Mapping

import torch
from torch import Tensor

from leviathan.config.embeddings.binary_codes import BinaryCodesConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import InputEmbedding, Normal


class BinaryCodesEmbedding(InputEmbedding[BinaryCodesConfig]):
    """Column c of E_i is bit c mod ⌈log₂V⌉ of i (least significant first) as ±1, times a constant.

    Source: arXiv 2605.09751. The constant is `embedding_init_std`, so that training starts at the
    scale of the other kinds; it is not trained.
    """

    def __init__(self, model: ModelConfig, config: BinaryCodesConfig) -> None:
        super().__init__(model, config)
        self.bits = max(1, (model.padded_vocab_size - 1).bit_length())
        self.d_model = model.d_model
        self.scale = config.embedding_init_std or 1.0
        # Empty buffer that follows the dtype and device of the model.
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.like: Tensor

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """No parameters."""
        return {}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {}

    def vectors(self, ids: Tensor) -> Tensor:
        """`[N] → [N, D]`."""
        place = torch.arange(self.d_model, device=ids.device) % self.bits
        signs = (ids.unsqueeze(-1) >> place & 1) * 2 - 1
        return signs.to(self.like.dtype) * self.scale

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """`[B, T] → [B, T, D]`, per token: computing a vector is as cheap as copying it."""
        self._check(ids if unique_ids is None else unique_ids)
        return self.vectors(ids.flatten()).view(*ids.shape, self.d_model)
