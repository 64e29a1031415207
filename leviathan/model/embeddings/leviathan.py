"""LEV, learned embedding vectorization: the input table as a continuous function of the token id.

Source: arXiv 2601.22040 v2, "Leviathan: Decoupling Input and Output Representations in Language
Models". Symbols follow the paper: N ids, k digits in base b, d seed width, h heads, κ knots, r
rank, D model width. `leviathan.model.kernels` computes E; `leviathan.model.kernels.reference` is a
literal implementation.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embeddings.leviathan import LeviathanConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import InputEmbedding, Normal
from leviathan.model.kernels.lev import Parameters, lev_vectors
from leviathan.model.tp_layout import Partial, Shard, TPPlan

LEV_ROLES: Mapping[str, Role] = {
    "codebooks": "codebook",
    "latent_weight": "matrix",
    "latent_bias": "bias",
    "norm_weight": "gain",
    "norm_bias": "bias",
    "spline_delta": "spline",
    "out_weight": "matrix",
}


def lev_init_spec(spline_init_std: float, summands: int) -> Mapping[str, Normal]:
    """Initial values for a sum over `summands` heads or modes."""
    return {
        "codebooks": Normal(0.02),
        "latent_weight": Normal(0.02),
        "latent_bias": Normal(),
        "norm_weight": Normal(mean=1.0),
        "norm_bias": Normal(),
        "spline_delta": Normal(spline_init_std),
        "out_weight": Normal(0.02 / math.sqrt(summands)),
    }


class LeviathanEmbedding(InputEmbedding[LeviathanConfig]):
    """E_i = Σ_ℓ W^out_ℓ Π_s φ_{ℓ,s}(z̃_ℓ(i)), a function of the digits of i.

    Parameters (1,205,376 + 512·D with the default configuration):
        codebooks `[k, b, d]`; latent_weight `[h, d, d]` and latent_bias `[h, d]`; norm_weight and
        norm_bias `[h, d]`; spline_delta `[h, d, κ, r]`; out_weight `[h, r, D]`.
    """

    linear_in = ("out_weight",)

    def __init__(self, model: ModelConfig, config: LeviathanConfig) -> None:
        super().__init__(model, config)
        self.base = config.base_at(model.padded_vocab_size)
        self.latent_scale = config.latent_scale
        self.tp_mode = config.tp_mode
        h, d = config.heads, config.d_seed
        self.codebooks = nn.Parameter(torch.empty(config.digits, self.base, d))
        self.latent_weight = nn.Parameter(torch.empty(h, d, d))
        self.latent_bias = nn.Parameter(torch.empty(h, d))
        self.norm_weight = nn.Parameter(torch.empty(h, d))
        self.norm_bias = nn.Parameter(torch.empty(h, d))
        self.spline_delta = nn.Parameter(torch.empty(h, d, config.knots, config.rank))
        self.out_weight = nn.Parameter(torch.empty(h, config.rank, model.d_model))

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """The values of the public implementation; `calibrate` sets the scale of the output."""
        return lev_init_spec(self.config.spline_init_std, self.config.heads)

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return LEV_ROLES

    def vectors(self, ids: Tensor) -> Tensor:
        """`[N] → [N, D]` in the dtype of the parameters, accumulated in fp32 or wider."""
        if self.tp.size == 1 or self.tp_mode == "replicated":
            return self._vectors(ids, self._parameters_in_order())
        if self.tp_mode == "ids":
            return self._vectors_by_ids(ids)
        return self.tp.reduce_from_tp(self._vectors(ids, self._parameters_in_order()))

    def _vectors_by_ids(self, ids: Tensor) -> Tensor:
        """Each rank generates an equal share of the vectors and gathers the others."""
        share = -(-len(ids) // self.tp.size)
        padded = F.pad(ids, (0, share * self.tp.size - len(ids)))
        mine = padded[self.tp.rank * share :][:share]
        return self.tp.gather_from_tp(self._vectors(mine, self._parameters_in_order()), 0)[
            : len(ids)
        ]

    def _vectors(self, ids: Tensor, p: Parameters) -> Tensor:
        return lev_vectors(ids, p, self.latent_scale == "inside")

    def tp_layout(self) -> TPPlan:
        """With `lev_tp: heads`, each rank has some of the heads, which share the codebooks."""
        if self.tp_mode == "replicated":
            return {}
        cut = Shard(0) if self.tp_mode == "heads" else Partial()
        return {name: cut for name in Parameters._fields} | {"codebooks": Partial()}

    def materialize(self, dtype: torch.dtype | None = None, chunk: int = 8192) -> Tensor:
        """See `InputEmbedding`; LEV processes blocks of ids, so `chunk` does not matter."""
        return super().materialize(dtype, chunk)

    def _parameters_in_order(self) -> Parameters:
        return Parameters(*(getattr(self, name) for name in Parameters._fields))
