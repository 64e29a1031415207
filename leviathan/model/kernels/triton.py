"""LEV's sigmoid, spline and product as one Triton kernel each for forward and backward, on CUDA.

A program processes a tile of ids × ranks of one head and iterates over the d dimensions, reading
the three spline rows with nonzero weight. In the backward pass, the gradient of a factor is the
product before it times the product after it times the incoming gradient; nothing is divided.
Products before and within a group of dimensions are in a scratch buffer of a few megabytes that
each program reuses. At the end of each group, products are rescaled by powers of two, which is
exact.

Each program sums the gradient of the coefficients over its tiles into a separate buffer, and the
buffers are then added in order: without atomics, the result is deterministic.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

IDS_PER_CALL = 8192
TILE_ELEMENTS = 2048  # ids × ranks per program
FORWARD_WARPS, BACKWARD_WARPS = 8, 16  # they need 79 and 128 registers per thread on sm_90
PARTS_BYTES = 2**27  # total size of all partial gradients of the coefficients
MAX_GROUP = (
    8  # dimensions between rescalings: eight factors in [2⁻¹⁵, 2¹⁵] stay in the range of fp32
)
MOST_RANK, MOST_KNOTS = 128, 64
MIN_SIDE = 16  # tile size of the operands of a matrix product
MAX_SHARE = tl.constexpr(60)  # powers of two applied to the product after a group


def unsupported_reason(delta: Tensor) -> str | None:
    """Why the kernels do not support coefficients `[h, d, κ, r]`; None if they do."""
    _, _, knots, rank = delta.shape
    if delta.dtype != torch.float32:
        return f"it supports float32, not {delta.dtype}"
    if rank > MOST_RANK:
        return f"rank {rank} exceeds the maximum of {MOST_RANK}"
    if knots > MOST_KNOTS:
        return f"{knots} knots exceed the maximum of {MOST_KNOTS}"
    return None


class FusedModes:
    """The kernels behind `select.LevBackend`; the arguments are those of `BlockedModes`."""

    def __init__(self, delta: Tensor, ids: int, gradient: bool) -> None:
        h, d, knots, r = delta.shape
        self.block = min(ids, IDS_PER_CALL)
        self._delta = delta.contiguous()
        ranks = max(MIN_SIDE, triton.next_power_of_2(r))
        self._tile = TILE_ELEMENTS // ranks
        group = next(g for g in range(min(MAX_GROUP, d), 0, -1) if d % g == 0)
        self._sizes: dict[str, Any] = dict(
            D_SEED=d, KNOTS=knots, RANK=r, RANKS=ranks, TILE=self._tile, GROUP=group
        )
        if not gradient:
            return
        self.grad_delta = torch.zeros_like(self._delta)
        tiles = triton.cdiv(self.block, self._tile)
        parts = PARTS_BYTES // (4 * delta.numel())
        self._workers = max(1, min(tiles, parts, _programs(delta) // h))
        programs, size = self._workers * h, self._tile * ranks
        groups = d // group
        self._products = delta.new_empty(programs, groups + group, size)
        self._exponents = delta.new_empty(programs, groups, size, dtype=torch.int32)

    def forward(self, argument: Tensor) -> Tensor:
        """`[n, h, d] → [n, h, r]`."""
        n, h, _ = argument.shape
        modes = argument.new_empty(n, h, self._sizes["RANK"])
        kernel: Any = _forward_kernel
        with _on(argument):
            kernel[(triton.cdiv(n, self._tile), h)](
                argument.permute(1, 2, 0).contiguous(),
                self._delta,
                modes,
                n,
                **self._sizes | {"num_warps": FORWARD_WARPS},
            )
        return modes

    def backward(self, argument: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Recomputes the modes and returns the gradient of the argument; adds to `grad_delta`."""
        n, h, _ = argument.shape
        modes = torch.empty_like(grad, memory_format=torch.contiguous_format)
        turned = argument.permute(1, 2, 0).contiguous()  # [h, d, n]
        grad_turned = torch.empty_like(turned)
        parts = grad.new_zeros(self._workers, *self._delta.shape)
        kernel: Any = _backward_kernel
        columns = max(MIN_SIDE, triton.next_power_of_2(self._sizes["KNOTS"]))
        with _on(argument):
            kernel[(self._workers, h)](
                turned,
                self._delta,
                grad.contiguous(),
                modes,
                grad_turned,
                parts,
                self._products,
                self._exponents,
                n,
                triton.cdiv(n, self._tile),
                **self._sizes | {"KNOT_COLUMNS": columns, "num_warps": BACKWARD_WARPS},
            )
        self.grad_delta += parts.sum(0)
        return modes, grad_turned.permute(2, 0, 1)


def _programs(like: Tensor) -> int:
    """Number of programs of the backward pass that the device can run concurrently."""
    if like.device.type != "cuda":
        return 8  # the interpreter
    return torch.cuda.get_device_properties(like.device).multi_processor_count


def _on(like: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()


@triton.jit
def _position(argument, s, n_ids, ids, valid, KNOTS: tl.constexpr):
    """x, its nearest knot, the offset from it, and the three unnormalized weights."""
    x = tl.sigmoid(tl.load(argument + s * n_ids + ids, mask=valid, other=0.0))
    t = x * (KNOTS - 1)
    nearest = tl.floor(t + 0.5)
    offset = t - nearest
    # Converting NaN to an integer could give an out-of-range index. The weights remain NaN.
    knot = tl.where(nearest == nearest, nearest, 0.0).to(tl.int32)
    left = tl.where(knot > 0, 0.5 * (0.5 - offset) * (0.5 - offset), 0.0)
    middle = 0.75 - offset * offset
    right = tl.where(knot < KNOTS - 1, 0.5 * (0.5 + offset) * (0.5 + offset), 0.0)
    return x, knot, offset, left, middle, right


@triton.jit
def _spline_rows(delta, s, knot, here, ranks, KNOTS: tl.constexpr, RANK: tl.constexpr):
    """Δ at the knots before, at and after `knot`: three of `[TILE, RANKS]`."""
    at = delta + ((s * KNOTS + knot) * RANK)[:, None] + ranks[None, :]
    before = tl.load(at - RANK, mask=here & (knot > 0)[:, None], other=0.0)
    middle = tl.load(at, mask=here, other=0.0)
    after = tl.load(at + RANK, mask=here & (knot < KNOTS - 1)[:, None], other=0.0)
    return before, middle, after


@triton.jit
def _factor(
    argument, delta, s, n_ids, ids, valid, here, ranks, KNOTS: tl.constexpr, RANK: tl.constexpr
):
    """φ_s `[TILE, RANKS]`."""
    _, knot, _, left, middle, right = _position(argument, s, n_ids, ids, valid, KNOTS)
    row_l, row_m, row_r = _spline_rows(delta, s, knot, here, ranks, KNOTS, RANK)
    share = 1.0 / (left + middle + right)
    return _mean(left * share, middle * share, right * share, row_l, row_m, row_r)


@triton.jit
def _mean(left, middle, right, row_l, row_m, row_r):
    """Σ_j B_j·(1+Δ_j); exactly zero if all Δ_j = -1: the ones are summed in the same order."""
    splines = left[:, None] * row_l + middle[:, None] * row_m + right[:, None] * row_r
    return (left + middle + right)[:, None] + splines


@triton.jit
def _rescale(x, exponent):
    """Scales x to a magnitude in [1, 2) by a power of two, which is added to the exponent."""
    biased = (x.to(tl.int32, bitcast=True) >> 23) & 255
    normal = (biased > 0) & (biased < 255)
    power = tl.where(normal, tl.minimum(biased - 127, 126), 0)
    return x * _power(-power), exponent + power


@triton.jit
def _power(exponent):
    """2^exponent for exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _times_power(x, exponent):
    exponent = tl.minimum(tl.maximum(exponent, -252), 252)
    half = exponent >> 1
    return x * _power(half) * _power(exponent - half)


@triton.jit
def _forward_kernel(
    argument,  # [h, d, n]
    delta,  # [h, d, κ, r]
    modes,  # [n, h, r]
    n_ids,
    D_SEED: tl.constexpr,
    KNOTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ranks = tl.arange(0, RANKS)
    valid = ids < n_ids
    here = valid[:, None] & (ranks < RANK)[None, :]
    argument += head * D_SEED * n_ids
    delta += head * D_SEED * KNOTS * RANK
    run = tl.full([TILE, RANKS], 1.0, tl.float32)
    exponent = tl.zeros([TILE, RANKS], tl.int32)
    for group in range(D_SEED // GROUP):
        for i in range(GROUP):
            s = group * GROUP + i
            run *= _factor(argument, delta, s, n_ids, ids, valid, here, ranks, KNOTS, RANK)
        run, exponent = _rescale(run, exponent)
    row = (ids.to(tl.int64) * tl.num_programs(1) + head) * RANK
    tl.store(modes + row[:, None] + ranks[None, :], _times_power(run, exponent), mask=here)


@triton.jit
def _backward_kernel(
    argument,  # [h, d, n]
    delta,  # [h, d, κ, r]
    grad_modes,  # [n, h, r]
    modes,  # [n, h, r]
    grad_argument,  # [h, d, n]
    grad_delta,  # [workers, h, d, κ, r], zero
    products,  # [workers · h, groups + GROUP, TILE · RANKS]
    exponents,  # [workers · h, groups, TILE · RANKS]
    n_ids,
    n_tiles,
    D_SEED: tl.constexpr,
    KNOTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    KNOT_COLUMNS: tl.constexpr,
):
    GROUPS: tl.constexpr = D_SEED // GROUP
    SIZE: tl.constexpr = TILE * RANKS
    worker = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    program = worker.to(tl.int64) * tl.num_programs(1) + head
    ranks = tl.arange(0, RANKS)
    columns = tl.arange(0, KNOT_COLUMNS)
    argument += head * D_SEED * n_ids
    grad_argument += head * D_SEED * n_ids
    delta += head * D_SEED * KNOTS * RANK
    grad_delta += program * D_SEED * KNOTS * RANK
    cell = tl.arange(0, TILE)[:, None] * RANKS + ranks[None, :]
    before_group = products + program * (GROUPS + GROUP) * SIZE + cell
    within_group = before_group + GROUPS * SIZE
    exponent_of = exponents + program * GROUPS * SIZE + cell
    coefficient = columns[:, None] * RANK + ranks[None, :]
    real = (columns < KNOTS)[:, None] & (ranks < RANK)[None, :]

    for tile in range(worker, n_tiles, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        valid = ids < n_ids
        here = valid[:, None] & (ranks < RANK)[None, :]
        mode = ((ids.to(tl.int64) * tl.num_programs(1) + head) * RANK)[:, None] + ranks[None, :]

        run = tl.full([TILE, RANKS], 1.0, tl.float32)
        exponent = tl.zeros([TILE, RANKS], tl.int32)
        for group in range(GROUPS):
            tl.store(before_group + group * SIZE, run)
            tl.store(exponent_of + group * SIZE, exponent)
            for i in range(GROUP):
                s = group * GROUP + i
                run *= _factor(argument, delta, s, n_ids, ids, valid, here, ranks, KNOTS, RANK)
            run, exponent = _rescale(run, exponent)
        tl.store(modes + mode, _times_power(run, exponent), mask=here)
        tl.debug_barrier()

        # `after`: the incoming gradient times all later factors.
        after = tl.load(grad_modes + mode, mask=here, other=0.0)
        after, after_exponent = _rescale(after, tl.zeros([TILE, RANKS], tl.int32))
        for step in range(GROUPS):
            group = GROUPS - 1 - step
            run = tl.load(before_group + group * SIZE)
            # The powers of two of both sides are applied here in shares, so that neither overflows.
            exponent = tl.load(exponent_of + group * SIZE) + after_exponent
            share_after = tl.minimum(tl.maximum(exponent >> 1, -MAX_SHARE), MAX_SHARE)
            after *= _power(share_after)
            run *= _power(tl.minimum(tl.maximum(exponent - share_after, -126), 127))
            for i in range(GROUP):
                s = group * GROUP + i
                tl.store(within_group + i * SIZE, run)
                run *= _factor(argument, delta, s, n_ids, ids, valid, here, ranks, KNOTS, RANK)
            tl.debug_barrier()
            for back in range(GROUP):
                i = GROUP - 1 - back
                s = group * GROUP + i
                x, knot, offset, left, middle, right = _position(
                    argument, s, n_ids, ids, valid, KNOTS
                )
                row_l, row_m, row_r = _spline_rows(delta, s, knot, here, ranks, KNOTS, RANK)
                total = left + middle + right
                share = 1.0 / total
                left, middle, right = left * share, middle * share, right * share
                before = tl.load(within_group + i * SIZE)
                grad_factor = before * after

                # dL/dx = Σ_j dL/dB_j · dB_j/dx, with B_j = weight_j / total.
                slope_l = tl.where(knot > 0, offset - 0.5, 0.0)
                slope_m = -2.0 * offset
                slope_r = tl.where(knot < KNOTS - 1, offset + 0.5, 0.0)
                change = slope_l + slope_m + slope_r
                slope_l = (slope_l - left * change) * share
                slope_m = (slope_m - middle * change) * share
                slope_r = (slope_r - right * change) * share
                slope = slope_l[:, None] * row_l + slope_m[:, None] * row_m
                slope += slope_r[:, None] * row_r
                grad_x = tl.sum(grad_factor * slope, axis=1) * (KNOTS - 1)
                tl.store(grad_argument + s * n_ids + ids, grad_x * x * (1.0 - x), mask=valid)

                # dL/dΔ = basisᵀ · dL/dφ, over the tile's ids.
                distance = columns[:, None] - knot[None, :]
                basis = tl.where(distance == 0, middle[None, :], 0.0)
                basis += tl.where(distance == -1, left[None, :], 0.0)
                basis += tl.where(distance == 1, right[None, :], 0.0)
                summand = tl.dot(basis, grad_factor, input_precision="ieee")
                target = grad_delta + s * KNOTS * RANK + coefficient
                summand += tl.load(target, mask=real, other=0.0)
                tl.store(target, summand, mask=real)

                after *= _mean(left, middle, right, row_l, row_m, row_r)
            after, after_exponent = _rescale(after, after_exponent - share_after)
            tl.debug_barrier()
