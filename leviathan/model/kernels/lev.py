"""LEV over distinct ids as one operation whose memory does not grow with their number.

The forward pass saves only the ids; the backward pass recomputes everything in blocks. The latents
need no product per id: W_ℓ z = Σ_r (W_ℓ C_r)[i_r], so the k·b codebook rows are projected once and
looked up. Parameters are arguments and nothing is kept between calls, so that engines may gather
and shard them; the operation is opaque to `torch.compile`.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from leviathan.model.kernels.cpu import BlockedModes, in_parallel

# ---------------------------------------------------------------- implementations
# On CUDA, the fused Triton kernels; elsewhere, or if they do not support the shape, the portable
# implementation. A fallback on CUDA is logged once, with its reason.

Result = TypeVar("Result")


class LevBackend(Protocol):
    """Interface between `lev.py` and an implementation."""

    block: int  # maximum number of ids per call
    grad_delta: Tensor  # [h, d, κ, r], summed over the calls of `backward`

    def forward(self, argument: Tensor) -> Tensor:
        """`[n, h, d] → [n, h, r]`."""
        ...

    def backward(self, argument: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Recomputes the modes `[n, h, r]` and returns the gradient of the argument `[n, h, d]`."""
        ...


def lev_backend(delta: Tensor, ids: int, gradient: bool) -> LevBackend:
    """The fastest implementation for coefficients `[h, d, κ, r]` and this number of ids."""
    if delta.is_cuda:
        reason = _no_triton()
        if reason is None:
            from leviathan.model.kernels import triton as fused

            reason = fused.unsupported_reason(delta)
            if reason is None:
                return fused.FusedModes(delta, ids, gradient)
        _warn_once(reason)
    return BlockedModes(delta, ids, gradient)


def share(work: Callable[[slice], Result], ids: Tensor) -> list[Result]:
    """Runs `work` on slices that cover all `ids`: one per core, or a single one on devices."""
    if ids.device.type == "cpu":
        return in_parallel(work, len(ids))
    return [work(slice(0, len(ids)))]


@functools.cache
def _no_triton() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    logging.getLogger(__name__).warning("the fused LEV kernel is not used: %s", reason)


# ---------------------------------------------------------------- operation

LAYER_NORM_EPS = 1e-5


class Parameters(NamedTuple):
    """Parameters of LEV in the order of the operation's arguments."""

    codebooks: Tensor  # [k, b, d]
    latent_weight: Tensor  # [h, d, d]
    latent_bias: Tensor  # [h, d]
    norm_weight: Tensor  # [h, d]
    norm_bias: Tensor  # [h, d]
    spline_delta: Tensor  # [h, d, κ, r]
    out_weight: Tensor  # [h, r, D]

    def widened(self) -> "Parameters":
        """In fp32, or unchanged if wider."""
        wide = torch.promote_types(self.out_weight.dtype, torch.float32)
        return Parameters(*(p.to(wide) for p in self))


def lev_vectors(ids: Tensor, parameters: Parameters, scale_inside: bool = False) -> Tensor:
    """E `[N, D]` of the ids `[N]` (int64, within [0, b^k)), in the dtype of the parameters.

    Accumulates in fp32 or wider. Differentiable once with respect to every parameter.

    Args:
        ids: should be distinct; repeated ids are computed repeatedly.
        parameters: parameters of LEV.
        scale_inside: σ(LN(½·x)) instead of σ(½·LN(x)).
    """
    return _rows(ids, *parameters, scale_inside)


def digits_of(ids: Tensor, base: int, count: int) -> Tensor:
    """Digits of `ids` `[N]` in `base`, most significant first: `[N, count]` int64."""
    powers = base ** torch.arange(count - 1, -1, -1, device=ids.device)
    return ids.unsqueeze(-1) // powers % base


@torch.library.custom_op("leviathan::lev_vectors", mutates_args=())
def _rows(
    ids: Tensor,
    codebooks: Tensor,
    latent_weight: Tensor,
    latent_bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    spline_delta: Tensor,
    out_weight: Tensor,
    scale_inside: bool,
) -> Tensor:
    given = Parameters(
        codebooks, latent_weight, latent_bias, norm_weight, norm_bias, spline_delta, out_weight
    )
    p = given.widened()
    projected = _projected(p)
    out = p.out_weight.flatten(0, 1)  # [h·r, D]
    rows = out_weight.new_empty(len(ids), out.shape[1])

    def work(part: slice) -> None:
        mine, target = ids[part], rows[part]
        latents = _Latents(mine, p, projected, scale_inside)
        path = lev_backend(p.spline_delta, len(mine), gradient=False)
        for block in _blocks(len(mine), path.block):
            modes = path.forward(latents.argument(block))
            target[block] = modes.flatten(1) @ out

    share(work, ids)
    return rows


@torch.library.custom_op("leviathan::lev_rows_backward", mutates_args=())
def _rows_backward(
    grad: Tensor,
    ids: Tensor,
    codebooks: Tensor,
    latent_weight: Tensor,
    latent_bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    spline_delta: Tensor,
    out_weight: Tensor,
    scale_inside: bool,
) -> list[Tensor]:
    given = Parameters(
        codebooks, latent_weight, latent_bias, norm_weight, norm_bias, spline_delta, out_weight
    )
    p = given.widened()
    projected = _projected(p)
    out = p.out_weight.flatten(0, 1)

    def work(part: slice) -> tuple[Tensor, ...]:
        mine, grad_mine = ids[part], grad[part]
        latents = _Latents(mine, p, projected, scale_inside)
        path = lev_backend(p.spline_delta, len(mine), gradient=True)
        grad_out = torch.zeros_like(out)
        for block in _blocks(len(mine), path.block):
            grad_rows = grad_mine[block].to(out.dtype)
            grad_modes = (grad_rows @ out.T).view(-1, *p.out_weight.shape[:2])  # [n, h, r]
            modes, grad_argument = path.backward(latents.argument(block), grad_modes)
            grad_out.addmm_(modes.flatten(1).T, grad_rows)
            latents.backward(grad_argument)
        return (*latents.gradients, path.grad_delta, grad_out)

    shares = zip(*share(work, ids), strict=True)
    grad_projected, grad_norm_weight, grad_norm_bias, grad_delta, grad_out = (
        functools.reduce(torch.add, parts) for parts in shares
    )
    grads = (
        *_through_projection(p, grad_projected),
        grad_norm_weight,
        grad_norm_bias,
        grad_delta,
        grad_out.view_as(p.out_weight),
    )
    return [g.to(p.dtype) for g, p in zip(grads, given, strict=True)]


@_rows.register_fake
def _(ids: Tensor, *rest: Any) -> Tensor:
    out_weight = rest[-2]
    return out_weight.new_empty(ids.shape[0], out_weight.shape[2])


@_rows_backward.register_fake
def _(grad: Tensor, ids: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(p) for p in rest[:-1]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, *parameters, ctx.scale_inside = inputs
    ctx.save_for_backward(ids, *parameters)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (None, *_rows_backward(grad, *ctx.saved_tensors, ctx.scale_inside), None)


torch.library.register_autograd("leviathan::lev_vectors", _differentiate, setup_context=_keep)


def _projected(p: Parameters) -> Tensor:
    """Products of codebook rows and W_ℓ, plus the bias for the first digit: `[k, b, h·d]`."""
    projected = p.codebooks @ p.latent_weight.flatten(0, 1).T
    projected[0] += p.latent_bias.flatten()
    return projected


def _through_projection(p: Parameters, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of codebooks, latent weight and latent bias, given that of `_projected`."""
    grad_mixer = grad.flatten(0, 1).T @ p.codebooks.flatten(0, 1)
    return (
        grad @ p.latent_weight.flatten(0, 1),
        grad_mixer.view_as(p.latent_weight),
        grad[0].sum(0).view_as(p.latent_bias),
    )


class _Latents:
    """Argument of the sigmoid ½·LN_ℓ(W_ℓ z + c_ℓ) in blocks, and its gradients."""

    def __init__(self, ids: Tensor, p: Parameters, projected: Tensor, inside: bool) -> None:
        self._p, self._projected, self._inside = p, projected, inside
        k, base, _ = projected.shape
        self._digits = digits_of(ids, base, k).T.contiguous()  # [k, n]
        # gradients of the projected codebooks, the weights of the norms and their biases
        self.gradients = tuple(torch.zeros_like(x) for x in (projected, p.norm_weight, p.norm_bias))

    def argument(self, part: slice) -> Tensor:
        """`[n, h, d]` of the ids in `part`; `backward` then refers to these ids."""
        self._part = self._digits[:, part]
        mixed = self._projected[0][self._part[0]]
        for place in range(1, len(self._part)):
            mixed += self._projected[place][self._part[place]]
        mixed = mixed.view(-1, *self._p.norm_weight.shape)
        if self._inside:
            mixed *= 0.5
        self._mixed = mixed
        self._normal, self._mean, self._rstd = torch.native_layer_norm(
            mixed, mixed.shape[-1:], None, None, LAYER_NORM_EPS
        )
        argument = torch.addcmul(self._p.norm_bias, self._normal, self._p.norm_weight)
        return argument if self._inside else argument.mul_(0.5)

    def backward(self, grad: Tensor) -> None:
        """Adds the gradients, given that of the last `argument`."""
        grad = grad if self._inside else grad * 0.5
        grad_projected, grad_weight, grad_bias = self.gradients
        grad_weight += (grad * self._normal).sum(0)
        grad_bias += grad.sum(0)
        grad_mixed = torch.ops.aten.native_layer_norm_backward(
            (grad * self._p.norm_weight).contiguous(),
            self._mixed,
            self._mixed.shape[-1:],
            self._mean,
            self._rstd,
            None,
            None,
            [True, False, False],
        )[0]
        if self._inside:
            grad_mixed = grad_mixed * 0.5
        for place, digit in enumerate(self._part):
            # deterministic sum of rows, also on CUDA
            grad_projected[place] += torch.ops.aten.embedding_dense_backward(
                grad_mixed.flatten(1), digit, self._projected.shape[1], -1, False
            )


def _blocks(count: int, most: int) -> list[slice]:
    """Splits into slices of nearly equal size: a small last one would need separate buffers."""
    if not count:
        return []
    size = -(-count // -(-count // most))
    return [slice(start, start + size) for start in range(0, count, size)]
