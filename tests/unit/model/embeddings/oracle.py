"""Every kind of input embedding written out from its definition, in float64 and differentiable.

It shares nothing with the package but the names of parameters: no kernel, no custom operation, no
blocks, no distinct ids. Sources: arXiv 2601.22040 v1 and v2, arXiv 1909.11942, arXiv 2605.09751.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LAYER_NORM_EPS = 1e-5


def vectors(kind: str, ids: Sequence[int], p: Mapping[str, Tensor], outside: bool = True) -> Tensor:
    """E `[N, D]` of the ids.

    Args:
        kind: of the embedding.
        ids: N token ids.
        p: name → parameter, float64.
        outside: LEV's latents are σ(½·LN(x)), else σ(LN(½·x)).
    """
    if kind in ("tied", "untied"):
        return torch.stack([p["weight"][token] for token in ids])
    if kind == "albert":
        return torch.stack([p["table"][token] @ p["projection"] for token in ids])
    if kind == "binary_codes":
        return torch.tensor([binary_code(token) for token in ids], dtype=torch.float64)
    if kind == "flat_mlp":
        return torch.stack([mlp(p["table"][token], p) for token in ids])
    if kind == "factored_mlp":
        return torch.stack([mlp(seed(token, p["codebooks"]), p) for token in ids])
    row = {"leviathan": leviathan_row, "leviathan_v1": leviathan_v1_row}[kind]
    return torch.stack([row(token, p, outside) for token in ids])


def binary_code(token: int, bits: int = 7, width: int = 32, size: float = 0.02) -> list[float]:
    """The bits as ±1, the lowest first, repeated; 96 ids have seven."""
    signs = [2 * int(bit) - 1 for bit in reversed(f"{token:0{bits}b}")]
    return [size * signs[column % bits] for column in range(width)]


def mlp(z: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    hidden = p["hidden_weight"] @ z + p["hidden_bias"]
    return p["out_weight"] @ (hidden / (1 + torch.exp(-hidden)))


def seed(token: int, codebooks: Tensor) -> Tensor:
    """z = Σ_r C_r[i_r], the most significant digit first."""
    k, b, _ = codebooks.shape
    digits = [token // b ** (k - 1 - place) % b for place in range(k)]
    return sum((codebooks[place][digit] for place, digit in enumerate(digits)), torch.zeros(()))


def latent(
    z: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, outside: bool
) -> Tensor:
    """z̃ `[d]` in (0, 1)."""
    mixed = weight @ z + bias
    mixed = mixed if outside else mixed / 2
    spread = torch.sqrt(((mixed - mixed.mean()) ** 2).mean() + LAYER_NORM_EPS)
    normal = (mixed - mixed.mean()) / spread * gain + shift
    return 1 / (1 + torch.exp(-(normal / 2 if outside else normal)))


def basis(x: Tensor, knots: int) -> Tensor:
    """B_j(x) `[κ]` of one x: quadratic pieces around each knot, divided by their sum."""
    values = []
    for j in range(knots):
        u = (x * (knots - 1) - j).abs()
        if u < 0.5:
            values.append(0.75 - u**2)
        elif u < 1.5:
            values.append((1.5 - u) ** 2 / 2)
        else:
            values.append(torch.zeros_like(u))
    stacked = torch.stack(values)
    return stacked / stacked.sum()


def modes(x: Tensor, delta: Tensor) -> Tensor:
    """M `[r]` of one head: Π_s Σ_j B_j(x_s)·(1 + Δ[s, j]), multiplied factor by factor."""
    d, knots, _ = delta.shape
    product = torch.ones_like(delta[0, 0])
    for s in range(d):
        product = product * (basis(x[s], knots) @ (1 + delta[s]))
    return product


def leviathan_row(token: int, p: Mapping[str, Tensor], outside: bool) -> Tensor:
    z, names = seed(token, p["codebooks"]), ("latent_weight", "latent_bias", "norm_weight")
    row = torch.zeros_like(p["out_weight"][0, 0])
    for head in range(len(p["out_weight"])):
        own = [p[name][head] for name in (*names, "norm_bias")]
        row = row + modes(latent(z, *own, outside), p["spline_delta"][head]) @ p["out_weight"][head]
    return row


def leviathan_v1_row(token: int, p: Mapping[str, Tensor], outside: bool) -> Tensor:
    names = ("latent_weight", "latent_bias", "norm_weight", "norm_bias")
    x = latent(seed(token, p["codebooks"]), *(p[name] for name in names), outside)
    row = x @ p["residual_weight"]
    for mode in range(len(p["out_weight"])):
        row = row + modes(x, p["spline_delta"][mode]) @ p["out_weight"][mode]
    return row
