"""The id's own bits: an input embedding without a parameter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from leviathan.config.embedding import BinaryCodesConfig
from leviathan.config.optim import Role
from leviathan.config.schema import ModelConfig
from leviathan.model.embedding.base import InputEmbedding, Normal


class BinaryCodesEmbedding(InputEmbedding):
    """Column c of E_i is ±1, the bit c mod ⌈log₂V⌉ of i (the lowest first), times a constant.

    Source: arXiv 2605.09751. The constant is `embedding_init_std`, so that training starts at the
    scale of the other kinds; unlike theirs, the scale here never moves.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        binary = config.embedding
        assert isinstance(binary, BinaryCodesConfig)
        self.bits = max(1, (config.padded_vocab_size - 1).bit_length())
        self.d_model = config.d_model
        self.scale = binary.embedding_init_std or 1.0
        # No values, so nothing to lose on the meta device: it follows the model's dtype and device.
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.like: Tensor

    @staticmethod
    def multiply_adds(config: ModelConfig) -> int:
        """None."""
        return 0

    def init_spec(self, config: ModelConfig) -> Mapping[str, Normal]:
        """Nothing to draw."""
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
        """`[B, T] → [B, T, D]`; computing a row is as cheap as copying it."""
        self._check(ids if unique_ids is None else unique_ids)
        return self.vectors(ids.flatten()).view(*ids.shape, self.d_model)
