"""Digits and codebooks of LEV with an MLP instead of splines."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from leviathan.config.embeddings.factored_mlp import FactoredMLPConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import Normal
from leviathan.model.embeddings.mlp import SeedMLPEmbedding
from leviathan.model.kernels.lev import digits_of


class FactoredMLPEmbedding(SeedMLPEmbedding[FactoredMLPConfig]):
    """The seed is the sum of one vector per digit from codebooks `[k, b, d]`, as in LEV."""

    def __init__(self, model: ModelConfig, config: FactoredMLPConfig) -> None:
        super().__init__(model, config, config.d_seed)
        self.base = config.base_at(model.padded_vocab_size)
        self.codebooks = nn.Parameter(torch.empty(config.digits, self.base, config.d_seed))

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """As in `SeedMLPEmbedding`."""
        return {**super().init_spec(model), "codebooks": Normal(len(self.codebooks) ** -0.5)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {**super().param_roles(), "codebooks": "codebook"}

    def seeds(self, ids: Tensor) -> Tensor:
        """Σ_r C_r[i_r], `[N] → [N, d]`."""
        digits = digits_of(ids, self.base, len(self.codebooks))  # [N, k]
        places = torch.arange(digits.shape[1], device=ids.device)
        return self.codebooks[places, digits].sum(1)
