"""Two-layer SiLU MLP that maps a seed to the vector of a token."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embeddings.base import MatchedConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import InputEmbedding, Normal

Config = TypeVar("Config", bound=MatchedConfig)


class SeedMLPEmbedding(InputEmbedding[Config]):
    """E_i = W^out · SiLU(W·z(i) + c) for the distinct ids of a batch; subclasses define z.

    Parameters: hidden_weight `[H, seed]`, hidden_bias `[H]`, out_weight `[D, H]`, and those of the
    seed.
    """

    linear_in = ("out_weight",)

    def __init__(self, model: ModelConfig, config: Config, seed_width: int) -> None:
        super().__init__(model, config)
        hidden = config.free
        self.hidden_weight = nn.Parameter(torch.empty(hidden, seed_width))
        self.hidden_bias = nn.Parameter(torch.empty(hidden))
        self.out_weight = nn.Parameter(torch.empty(model.d_model, hidden))

    @abstractmethod
    def seeds(self, ids: Tensor) -> Tensor:
        """Seeds of the ids `[N]`: `[N, seed]`, of unit variance at step 0."""

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """Initialization such that the arguments of SiLU have unit variance.

        With the std of the backbone, 0.02, SiLU would be nearly linear. `calibrate` then sets the
        scale of the output.
        """
        return {
            "hidden_weight": Normal(self.hidden_weight.shape[1] ** -0.5),
            "hidden_bias": Normal(),
            "out_weight": Normal(model.init_std),
        }

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {"hidden_weight": "matrix", "hidden_bias": "bias", "out_weight": "matrix"}

    def vectors(self, ids: Tensor) -> Tensor:
        """`[N] → [N, D]`."""
        hidden = F.silu(F.linear(self.seeds(ids), self.hidden_weight, self.hidden_bias))
        return F.linear(hidden, self.out_weight)
