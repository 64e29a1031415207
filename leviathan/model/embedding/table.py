"""Input embeddings that are tables."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.optim import Role
from leviathan.config.schema import ModelConfig
from leviathan.model.embedding.base import InputEmbedding, Normal
from leviathan.model.tp_layout import Shard, TPPlan


class UntiedEmbedding(InputEmbedding):
    """A `V × D` table."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.d_model))

    @staticmethod
    def multiply_adds(config: ModelConfig) -> int:
        """None: a look-up."""
        return 0

    def init_spec(self, config: ModelConfig) -> Mapping[str, Normal]:
        """The backbone's std."""
        return {"weight": Normal(config.init_std)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {"weight": "table"}

    def vectors(self, ids: Tensor) -> Tensor:
        """Look-up `[N] → [N, D]`."""
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        mine, local = self._own(ids)
        return self.tp.reduce_from_tp(F.embedding(local, self.weight) * mine.unsqueeze(-1))

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """Look-up `[B, T] → [B, T, D]`; a whole table gains nothing from the distinct ids."""
        if self.tp.size > 1:
            return super().forward(ids, unique_ids, inverse)  # fewer rows to sum over the ranks
        self._check(ids if unique_ids is None else unique_ids)
        return F.embedding(ids, self.weight)

    def tp_layout(self) -> TPPlan:
        """Each rank has some of the ids."""
        return {"weight": Shard(0)}

    def _own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids are in this rank's part of the table, and where (else 0)."""
        local = ids - self.tp.rank * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight))
        return mine, local.where(mine, 0)


class TiedEmbedding(UntiedEmbedding):
    """A `V × D` table that is also the output head's weight: the main baseline."""

    @property
    def output_weight(self) -> nn.Parameter:
        """The table itself."""
        return self.weight
