"""Digits and codebooks of LEV with an MLP instead of splines."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from leviathan.config.embedding import FactoredMLPConfig, lev_base
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import Normal
from leviathan.model.embeddings.mlp import SeedMLPEmbedding
from leviathan.model.kernels.lev import digits_of


class FactoredMLPEmbedding(SeedMLPEmbedding):
    """The seed is the sum of one vector per digit from codebooks `[k, b, d]`, as in LEV."""

    def __init__(self, config: ModelConfig) -> None:
        factored = _factored(config)
        super().__init__(config, factored.d_seed, factored.hidden)
        self.base = lev_base(factored, config.padded_vocab_size)
        self.codebooks = nn.Parameter(torch.empty(factored.digits, self.base, factored.d_seed))

    @staticmethod
    def multiply_adds(config: ModelConfig) -> int:
        """d·H + H·D."""
        factored = _factored(config)
        return (factored.hidden or 0) * (factored.d_seed + config.d_model)

    def init_spec(self, config: ModelConfig) -> Mapping[str, Normal]:
        """As in `MLPEmbedding`."""
        return {**super().init_spec(config), "codebooks": Normal(len(self.codebooks) ** -0.5)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {**super().param_roles(), "codebooks": "codebook"}

    def seeds(self, ids: Tensor) -> Tensor:
        """Σ_r C_r[i_r], `[N] → [N, d]`."""
        digits = digits_of(ids, self.base, len(self.codebooks))  # [N, k]
        places = torch.arange(digits.shape[1], device=ids.device)
        return self.codebooks[places, digits].sum(1)


def _factored(config: ModelConfig) -> FactoredMLPConfig:
    assert isinstance(config.embedding, FactoredMLPConfig)
    return config.embedding
