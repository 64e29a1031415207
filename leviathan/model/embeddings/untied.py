"""A separate table."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embeddings.tied import TiedConfig
from leviathan.config.embeddings.untied import UntiedConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import InputEmbedding, Normal
from leviathan.model.tp_layout import Shard, TPPlan


class UntiedEmbedding(InputEmbedding[UntiedConfig | TiedConfig]):
    """A `V × D` table."""

    def __init__(self, model: ModelConfig, config: UntiedConfig | TiedConfig) -> None:
        super().__init__(model, config)
        self.weight = nn.Parameter(torch.empty(model.padded_vocab_size, model.d_model))

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """The std of the backbone."""
        return {"weight": Normal(model.init_std)}

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
        """Look-up `[B, T] → [B, T, D]`; distinct ids are only used if the table is sharded."""
        if self.tp.size > 1:
            return super().forward(ids, unique_ids, inverse)  # fewer vectors to sum over the ranks
        self._check(ids if unique_ids is None else unique_ids)
        return F.embedding(ids, self.weight)

    def tp_layout(self) -> TPPlan:
        """Each rank has the vectors of some of the ids."""
        return {"weight": Shard(0)}

    def _own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each id is in the part of this rank, and its local index (else 0)."""
        local = ids - self.tp.rank * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight))
        return mine, local.where(mine, 0)
