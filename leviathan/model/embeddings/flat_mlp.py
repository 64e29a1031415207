"""A narrow table followed by an MLP."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embeddings.flat_mlp import FlatMLPConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import Normal
from leviathan.model.embeddings.mlp import SeedMLPEmbedding


class FlatMLPEmbedding(SeedMLPEmbedding[FlatMLPConfig]):
    """The seed is a row of a table `[V, e]`: ids share no parameters of the seed."""

    def __init__(self, model: ModelConfig, config: FlatMLPConfig) -> None:
        super().__init__(model, config, config.table_width)
        self.table = nn.Parameter(torch.empty(model.padded_vocab_size, config.table_width))

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """As in `SeedMLPEmbedding`."""
        return {**super().init_spec(model), "table": Normal(1.0)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {**super().param_roles(), "table": "table"}

    def seeds(self, ids: Tensor) -> Tensor:
        """Look-up `[N] → [N, e]`."""
        return F.embedding(ids, self.table)
