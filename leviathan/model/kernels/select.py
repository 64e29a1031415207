"""Selects the implementation of LEV's spline and product for a device and dtype.

On CUDA, the fused Triton kernels; elsewhere, or if they do not support the shape, the portable
implementation. A fallback on CUDA is logged once, with its reason.
"""

import functools
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from leviathan.model.kernels.blocked import BlockedModes
from leviathan.model.kernels.workers import in_parallel

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
            from leviathan.model.kernels import fused

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
