"""Input embeddings that are tables."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.schema import ModelConfig
from leviathan.model.embedding.base import InputEmbedding, Normal


class UntiedEmbedding(InputEmbedding):
    """A `V × D` table."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.d_model))

    @staticmethod
    def multiply_adds(config: ModelConfig) -> int:
        """None: a look-up."""
        return 0

    def initial(self, config: ModelConfig) -> Mapping[str, Normal]:
        """The backbone's std."""
        return {"weight": Normal(config.init_std)}

    def rows(self, ids: Tensor) -> Tensor:
        """Look-up `[N] → [N, D]`."""
        return F.embedding(ids, self.weight)

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """Look-up `[B, T] → [B, T, D]`; a table gains nothing from the distinct ids."""
        self._check(ids if unique_ids is None else unique_ids)
        return F.embedding(ids, self.weight)


class TiedEmbedding(UntiedEmbedding):
    """A `V × D` table that is also the output head's weight: the main baseline."""

    @property
    def output_weight(self) -> nn.Parameter:
        """The table itself."""
        return self.weight
