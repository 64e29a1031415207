"""Which implementation of LEV's spline and product serves a device and dtype.

On CUDA the fused Triton kernels; where they cannot serve, and everywhere else, the portable path.
A fall-back on CUDA is logged once, with its reason.
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
    """What `lev.py` asks of an implementation."""

    block: int  # ids a call at most
    grad_delta: Tensor  # [h, d, κ, r], the sum over the calls of `backward`

    def forward(self, argument: Tensor) -> Tensor:
        """`[n, h, d] → [n, h, r]`."""
        ...

    def backward(self, argument: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Modes again `[n, h, r]`, and the gradient of the argument `[n, h, d]`."""
        ...


def lev_backend(delta: Tensor, ids: int, gradient: bool) -> LevBackend:
    """The fastest implementation for these coefficients `[h, d, κ, r]` and so many ids."""
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
    """`work` on slices that together are all of `ids`: one for each core; on devices, just one."""
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
    logging.getLogger(__name__).warning("LEV's fused kernel is not used: %s", reason)
