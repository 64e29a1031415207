"""A narrow table followed by an MLP."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embedding import FlatMLPConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import Normal
from leviathan.model.embeddings.mlp import SeedMLPEmbedding


class FlatMLPEmbedding(SeedMLPEmbedding):
    """The seed is a row of a table `[V, e]`: ids share no parameters of the seed."""

    def __init__(self, config: ModelConfig) -> None:
        width = _flat(config).width
        assert width is not None, "not resolved"
        super().__init__(config, width, _flat(config).hidden)
        self.table = nn.Parameter(torch.empty(config.padded_vocab_size, width))

    @staticmethod
    def multiply_adds(config: ModelConfig) -> int:
        """e·H + H·D."""
        flat = _flat(config)
        return (flat.hidden or 0) * ((flat.width or 0) + config.d_model)

    def init_spec(self, config: ModelConfig) -> Mapping[str, Normal]:
        """As in `MLPEmbedding`."""
        return {**super().init_spec(config), "table": Normal(1.0)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {**super().param_roles(), "table": "table"}

    def seeds(self, ids: Tensor) -> Tensor:
        """Look-up `[N] → [N, e]`."""
        return F.embedding(ids, self.table)


def _flat(config: ModelConfig) -> FlatMLPConfig:
    assert isinstance(config.embedding, FlatMLPConfig)
    return config.embedding
