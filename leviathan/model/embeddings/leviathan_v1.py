"""The generator of the first version of the paper: one latent for all modes, and a residual.

Source: arXiv 2601.22040 v1, "A Separable Architecture for Continuous Token Representation in
Language Models". Symbols as in `leviathan`; M modes.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.embeddings.leviathan_v1 import LeviathanV1Config
from leviathan.config.run import ModelConfig, Role
from leviathan.model.embeddings.base import InputEmbedding, Normal
from leviathan.model.embeddings.leviathan import LEV_ROLES, lev_init_spec
from leviathan.model.kernels.lev import LAYER_NORM_EPS, Parameters, digits_of, lev_vectors


class LeviathanV1Embedding(InputEmbedding[LeviathanV1Config]):
    """e_i = W_out · concat_m(Π_s φ_{m,s}(z̃(i))) + W_res · z̃(i).

    Parameters (2,136,576 + 640·D with the default configuration at V = 200,376):
        codebooks `[k, b, d]`; latent_weight `[d, d]`, latent_bias `[d]`; norm_weight and norm_bias
        `[d]`; spline_delta `[M, d, κ, r]`; out_weight `[M, r, D]`; residual_weight `[d, D]`.
    """

    linear_in = ("out_weight", "residual_weight")

    def __init__(self, model: ModelConfig, config: LeviathanV1Config) -> None:
        super().__init__(model, config)
        self.base = config.base_at(model.padded_vocab_size)
        self.latent_scale = config.latent_scale
        d = config.d_seed
        self.codebooks = nn.Parameter(torch.empty(config.digits, self.base, d))
        self.latent_weight = nn.Parameter(torch.empty(d, d))
        self.latent_bias = nn.Parameter(torch.empty(d))
        self.norm_weight = nn.Parameter(torch.empty(d))
        self.norm_bias = nn.Parameter(torch.empty(d))
        self.spline_delta = nn.Parameter(torch.empty(config.modes, d, config.knots, config.rank))
        self.out_weight = nn.Parameter(torch.empty(config.modes, config.rank, model.d_model))
        self.residual_weight = nn.Parameter(torch.empty(d, model.d_model))

    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """The values of LEV; `calibrate` then sets the scale of the output."""
        lev = lev_init_spec(self.config.spline_init_std, self.config.modes)
        return {**lev, "residual_weight": Normal(0.02)}

    def param_roles(self) -> Mapping[str, Role]:
        """See `InputEmbedding`."""
        return {**LEV_ROLES, "residual_weight": "matrix"}

    def vectors(self, ids: Tensor) -> Tensor:
        """`[N] → [N, D]` in the dtype of the parameters, accumulated in fp32 or wider.

        W_out · concat(modes) is a sum over modes, so the modes are LEV heads that share one latent.
        """
        wide = torch.promote_types(self.out_weight.dtype, torch.float32)
        p = {name: value.to(wide) for name, value in self.named_parameters()}
        for name in ("latent_weight", "latent_bias", "norm_weight", "norm_bias"):
            p[name] = p[name].expand(len(self.out_weight), *p[name].shape)
        heads = Parameters(*(p[name] for name in Parameters._fields))
        rows = lev_vectors(ids, heads, self.latent_scale == "inside")
        rows = rows + self._latent(ids, wide) @ p["residual_weight"]
        return rows.to(self.out_weight.dtype)

    def _latent(self, ids: Tensor, wide: torch.dtype) -> Tensor:
        """z̃ `[N, d]`: σ(½·LN(Wz+c)), or σ(LN(½·(Wz+c))) if `latent_scale` is `inside`."""
        digits = digits_of(ids, self.base, len(self.codebooks))  # [N, k]
        places = torch.arange(digits.shape[1], device=ids.device)
        seed = self.codebooks[places, digits].to(wide).sum(1)  # [N, d]
        mixed = F.linear(seed, self.latent_weight.to(wide), self.latent_bias.to(wide))
        inside = self.latent_scale == "inside"
        normal = F.layer_norm(
            mixed * 0.5 if inside else mixed,
            mixed.shape[-1:],
            self.norm_weight.to(wide),
            self.norm_bias.to(wide),
            LAYER_NORM_EPS,
        )
        return torch.sigmoid(normal if inside else normal * 0.5)
