"""The three tensor-parallel modes of LEV: time, bytes sent, memory.

    python benchmarks/tensor_parallel.py [--json] [--rounds N] [--device cuda] [--ranks N]

This program starts the ranks, with one thread each on the CPU (one device each on CUDA). They hold
the 60M-like model with 50k ids once per mode. Bytes are sent by one rank with ring algorithms: for
n ranks, 2(n-1)/n of the tensor for an all-reduce, (n-1)/n of the result for an all-gather. "Once a
step" is the sum of gradients of replicated parameters (LEV's and the norms').

`ids` is the default of `embedding.tp_mode` because generating vectors is expensive and vectors are
small: each rank generates its share and receives the rest. `replicated` generates every vector on
every rank and sends as much per step. `heads` takes as long as `ids` and halves LEV's memory, but
sends twice as much per micro-batch, rounds partial sums, and needs a tp that divides the heads. Use
it if LEV's few megabytes matter.
"""

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from harness import Report, Work, arguments, paired, peak_megabytes, ready
from run import one_batch, run_config, scratch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from leviathan.config.embeddings.leviathan import LeviathanConfig
from leviathan.data.loader import Batch
from leviathan.model.tp_layout import TPGroup
from leviathan.model.transformer import CausalLM
from leviathan.parallel.launch_env import free_port, read_launch_env
from leviathan.parallel.mesh import Mesh, init_mesh
from leviathan.parallel.tensor_parallel import ProcessTPGroup, apply_tp
from leviathan.train.loop import new_model

DEFAULT = LeviathanConfig().tp_mode
MODES = (DEFAULT, "replicated", "heads")
assert DEFAULT == "ids", "the goals below are about it"
GOALS = {  # LEV is a few percent of a micro-batch, and `heads` takes as long as `ids`
    ("replicated", "embedding"): "≥ 1.3",
    ("replicated", "micro_batch"): "≥ 0.97",
    ("heads", "embedding"): "≥ 0.9",
    ("heads", "micro_batch"): "≥ 0.97",
}
BYTES = 16  # bytes per parameter: fp32 weight, gradient and both moments


class Meter(ProcessTPGroup):
    """TPGroup that count the bytes that this rank sends."""

    sent = 0.0

    def sum_(self, x: Tensor) -> Tensor:
        """See `TPGroup`."""
        self.sent += 2 * (self.size - 1) / self.size * x.nbytes
        return super().sum_(x)

    def highest_(self, x: Tensor) -> Tensor:
        """See `TPGroup`."""
        self.sent += 2 * (self.size - 1) / self.size * x.nbytes
        return super().highest_(x)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """See `TPGroup`."""
        self.sent += (self.size - 1) * x.nbytes
        return super().gather_from_tp(x, dim)


class Way:
    """Builds the model with one tensor-parallel mode of LEV."""

    def __init__(self, mode: str, rows: int, mesh: Mesh) -> None:
        config = run_config(scratch(), {"kind": "fsdp2"}, rows)
        embedding = config.model.embedding.model_copy(update={"tp_mode": mode})
        model = config.model.model_copy(update={"embedding": embedding})
        config = config.model_copy(update={"model": model})
        self.batch: Batch = one_batch(config).to(mesh.device)
        self.model: CausalLM = new_model(config)
        self.layout = apply_tp(self.model, mesh.tp_group)
        self.model.to(mesh.device)
        self.meter = Meter(mesh.tp_group)
        for module in self.model.modules():
            if isinstance(getattr(module, "tp", None), TPGroup):
                cast(Any, module).tp = self.meter
        lev = self.model.model.embed_tokens
        self.held = sum(p.numel() for p in lev.parameters()) * BYTES / 1e6
        self.slope = torch.randn(*self.batch.input_ids.shape, config.model.d_model)
        self.slope = self.slope.to(mesh.device)

    def micro_batch(self) -> None:
        """Forward and backward."""
        batch = self.batch
        loss = self.model(batch.input_ids, batch.targets, batch.unique_ids, batch.inverse)
        self._backward(loss / batch.n_targets)

    def embedding(self) -> None:
        """Forward and backward of the input embedding only."""
        batch = self.batch
        rows = self.model.model.embed_tokens(batch.input_ids, batch.unique_ids, batch.inverse)
        self._backward((rows * self.slope).sum())

    def _backward(self, loss: Tensor) -> None:
        for p in self.model.parameters():
            p.grad = None
        loss.backward()

    def megabytes(self, work: Work) -> float:
        """Returns the bytes sent by this rank."""
        self.meter.sent = 0
        work()
        return self.meter.sent / 1e6


def measure(report: Report, ways: Sequence[Way], rounds: int, device: torch.device) -> None:
    """Compares the default with the other modes on all ranks; only rank 0 prints."""
    default, others = ways[0], dict(zip(MODES[1:], ways[1:], strict=True))
    tokens, distinct = default.batch.input_ids.numel(), len(default.batch.unique_ids)
    text = f"{tokens} tokens, {distinct} distinct"
    for mode, other in others.items():
        for part in ("embedding", "micro_batch"):
            pairs = paired(getattr(default, part), getattr(other, part), rounds, device)
            times = [(a * 1e3, b * 1e3) for a, b in pairs]
            what = "LEV forward+backward" if part == "embedding" else "micro-batch"
            report.compare(f"{DEFAULT}: {what}, {text}", times, mode, "ms", GOALS[mode, part])
    for mode, way in zip(MODES, ways, strict=True):
        report.figure(f"{mode}: sent, LEV a micro-batch", way.megabytes(way.embedding), "MB")
        whole = way.megabytes(way.micro_batch)
        report.figure(f"{mode}: sent, a micro-batch in all", whole, "MB")
        once = sum(p.nbytes for n, p in way.model.named_parameters() if not way.layout.shard(n))
        ranks = way.meter.size
        report.figure(f"{mode}: sent, once a step", 2 * (ranks - 1) / ranks * once / 1e6, "MB")
        report.figure(f"{mode}: LEV's weights, gradients, moments a rank", way.held, "MB")
        peak = peak_megabytes(way.embedding, device)
        report.figure(f"{mode}: peak extra memory, LEV forward+backward", peak, "MB")


def on_a_rank(rank: int, port: int, options: argparse.Namespace) -> None:
    """Runs one rank; only rank 0 prints."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"WORLD_SIZE": options.ranks, "LOCAL_WORLD_SIZE": options.ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    mesh = init_mesh(read_launch_env(), tp=options.ranks)
    with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(io.StringIO()):
        ways = [Way(mode, options.rows, mesh) for mode in MODES]
        measure(Report("tensor_parallel", options.json), ways, options.rounds, mesh.device)


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=7)
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (2)")
    parser.add_argument("--rows", type=int, default=4, help="sequences of 512 tokens (default: 4)")
    options = parser.parse_args()
    ready(options.device)
    spawn(on_a_rank, (free_port(), options), options.ranks)


if __name__ == "__main__":
    main()
