"""LEV, learned embedding vectorisation: the input table as a continuous function of the token id.

Source: arXiv 2601.22040 v2, "Leviathan: Decoupling Input and Output Representations in Language
Models". Letters in comments are the paper's: N ids, k digits in base b, d seed width, h heads,
κ knots, r rank, D model width.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leviathan.config.schema import LeviathanConfig, ModelConfig, lev_base
from leviathan.model.embedding.base import InputEmbedding, Normal

LAYER_NORM_EPS = 1e-5
CALIBRATION_IDS = 1024


def digits_of(ids: Tensor, base: int, count: int) -> Tensor:
    """Digits of `ids` `[N]` in `base`, most significant first: `[N, count]` int64."""
    powers = base ** torch.arange(count - 1, -1, -1, device=ids.device)
    return ids.unsqueeze(-1) // powers % base


def spline_basis(x: Tensor, knots: int) -> Tensor:
    """Quadratic B-splines centred on `knots` uniform knots of [0, 1], summing to one.

    Args:
        x: any shape, values in [0, 1].
        knots: κ; knot j stands at j/(κ-1).

    Returns:
        `[*x.shape, κ]`; at most three of the κ values are not zero. The division by the sum
        matters only within half a knot spacing of a border, where a neighbour is missing.
    """
    centres = torch.arange(knots, device=x.device, dtype=x.dtype)
    u = (x.unsqueeze(-1) * (knots - 1) - centres).abs()
    inner = 0.75 - u * u
    outer = 0.5 * (1.5 - u).clamp(min=0).square()
    basis = torch.where(u < 0.5, inner, outer)
    return basis / basis.sum(-1, keepdim=True)


def _pairwise(factors: Tensor) -> Tensor:
    """One level of the product tree over the second to last dimension: `[..., n, r]`."""
    half = factors.shape[-2] // 2
    paired = factors[..., :half, :] * factors[..., half : 2 * half, :]
    return torch.cat([paired, factors[..., 2 * half :, :]], dim=-2)


def tree_product(factors: Tensor) -> Tensor:
    """Product over the second to last dimension, `[..., n, r] → [..., r]`.

    Only multiplications, so the gradient is exact where factors are zero (the product divided by
    a factor, or a sum of logarithms, is not). After two levels the partial products are brought
    near 1 by powers of two, which rounds nothing, and the powers are put back at the end: no
    intermediate overflows or underflows where the product itself does not.
    """
    for _ in range(2):
        if factors.shape[-2] > 1:
            factors = _pairwise(factors)
    with torch.no_grad():
        magnitude = torch.where(factors == 0, 1, factors.abs())
        exponent = magnitude.log2().round().clamp(-126, 126)  # powers that fp32 has
        total = exponent.sum(-2)
        low = (total / 2).round()
    factors = factors * torch.exp2(-exponent)
    while factors.shape[-2] > 1:
        factors = _pairwise(factors)
    return factors.squeeze(-2) * torch.exp2(low) * torch.exp2(total - low)


class LeviathanEmbedding(InputEmbedding):
    """E_i = Σ_ℓ W^out_ℓ Π_s φ_{ℓ,s}(z̃_ℓ(i)), a function of the digits of i.

    Parameters, with the config's defaults 1,205,376 + 512·D of them:
        codebooks `[k, b, d]`; latent_weight `[h, d, d]` and latent_bias `[h, d]`; norm_weight and
        norm_bias `[h, d]`; spline_delta `[h, d, κ, r]`; out_weight `[h, r, D]`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        lev = _lev(config)
        self.base = lev_base(lev, config.padded_vocab_size)
        self.latent_scale = lev.latent_scale
        h, d = lev.heads, lev.d_seed
        self.codebooks = nn.Parameter(torch.empty(lev.digits, self.base, d))
        self.latent_weight = nn.Parameter(torch.empty(h, d, d))
        self.latent_bias = nn.Parameter(torch.empty(h, d))
        self.norm_weight = nn.Parameter(torch.empty(h, d))
        self.norm_bias = nn.Parameter(torch.empty(h, d))
        self.spline_delta = nn.Parameter(torch.empty(h, d, lev.knots, lev.rank))
        self.out_weight = nn.Parameter(torch.empty(h, lev.rank, config.d_model))

    @staticmethod
    def param_count(config: ModelConfig) -> int:
        """k·b·d + h·d² + 3·h·d + h·d·κ·r + h·r·D."""
        lev = _lev(config)
        h, d = lev.heads, lev.d_seed
        codebooks = lev.digits * lev_base(lev, config.padded_vocab_size) * d
        latent = h * d * d + 3 * h * d
        return codebooks + latent + h * d * lev.knots * lev.rank + h * lev.rank * config.d_model

    @staticmethod
    def multiply_adds(config: ModelConfig) -> int:
        """Per id: latents, splines (the dense product over κ), product over d, output."""
        lev = _lev(config)
        h, d, r = lev.heads, lev.d_seed, lev.rank
        return h * d * d + h * d * lev.knots * r + h * d * r + h * r * config.d_model

    def initial(self, config: ModelConfig) -> Mapping[str, Normal]:
        """The public implementation's values; `calibrate` then sets the scale of the output."""
        return {
            "codebooks": Normal(0.02),
            "latent_weight": Normal(0.02),
            "latent_bias": Normal(),
            "norm_weight": Normal(mean=1.0),
            "norm_bias": Normal(),
            "spline_delta": Normal(0.1),
            "out_weight": Normal(0.02 / math.sqrt(_lev(config).heads)),
        }

    @torch.no_grad()
    def calibrate(self, config: ModelConfig) -> None:
        """Scales `out_weight` so that E over evenly spaced ids has std `embedding_init_std`.

        In float64 on the CPU, so that the factor, rounded to fp32, is the same everywhere.
        """
        wanted = _lev(config).embedding_init_std
        if wanted is None:
            return
        parameters = {n: p.to("cpu", torch.float64) for n, p in self.named_parameters()}
        step = max(1, self.vocabulary // CALIBRATION_IDS)
        sample = torch.arange(0, self.vocabulary, step).split(64)
        rows = torch.cat([self._generate(ids, parameters) for ids in sample])
        self.out_weight.mul_(wanted / float(rows.std()))

    def rows(self, ids: Tensor) -> Tensor:
        """`[N] → [N, D]` in the parameters' dtype, accumulated in fp32 or wider."""
        wide = torch.promote_types(self.out_weight.dtype, torch.float32)
        parameters = {name: p.to(wide) for name, p in self.named_parameters()}
        return self._generate(ids, parameters).to(self.out_weight.dtype)

    def _generate(self, ids: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        digits = digits_of(ids, self.base, self.codebooks.shape[0])  # [N, k]
        places = torch.arange(digits.shape[1], device=ids.device)
        seed = p["codebooks"][places, digits].sum(1)  # [N, d]
        latent = torch.sigmoid(self._normalised(seed, p))  # [N, h, d]
        basis = spline_basis(latent, self.spline_delta.shape[2])  # [N, h, d, κ]
        # ΣB = 1, so ΣB·(1+Δ) = 1 + ΣB·Δ, with one rounding less.
        factors = 1 + torch.einsum("nhsj,hsjr->nhsr", basis, p["spline_delta"])
        modes = tree_product(factors)  # [N, h, r]
        return modes.flatten(1) @ p["out_weight"].flatten(0, 1)  # [N, D]

    def _normalised(self, seed: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        """The sigmoid's argument `[N, h, d]`: ½·LN(Wz+c), or LN(½·(Wz+c)) if so configured."""
        mixed = torch.einsum("ns,hts->nht", seed, p["latent_weight"]) + p["latent_bias"]
        inside = self.latent_scale == "inside"
        normal = F.layer_norm(
            mixed * 0.5 if inside else mixed, mixed.shape[-1:], eps=LAYER_NORM_EPS
        )
        normal = normal * p["norm_weight"] + p["norm_bias"]
        return normal if inside else normal * 0.5


def _lev(config: ModelConfig) -> LeviathanConfig:
    assert isinstance(config.embedding, LeviathanConfig)
    return config.embedding
