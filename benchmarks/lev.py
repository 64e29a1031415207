"""LEV forward and backward against the direct implementation, at d 128, h 8, κ 16, r 64.

python benchmarks/lev.py [--json] [--rounds N] [--device cuda]
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from batch import text_batch
from harness import Report, arguments, paired, peak_megabytes, ready
from torch import Tensor

from leviathan.config.run import ModelConfig
from leviathan.model.embeddings import build_embedding
from leviathan.model.init import draw_values
from leviathan.model.kernels.lev import Parameters, lev_vectors
from leviathan.model.kernels.reference import reference_vectors

VOCABULARY = 200_376
LITERAL = "literal, prod over factors"


def parameters(width: int, device: torch.device) -> Parameters:
    """LEV's initial parameters for D = `width`."""
    shape = {"d_model": width, "n_layers": 1, "n_heads": 1, "vocab_size": VOCABULARY}
    config = ModelConfig.model_validate(shape | {"embedding": {"kind": "leviathan"}})
    embedding = build_embedding(config)
    how = embedding.init_spec(config)
    values = {
        name: draw_values(name, p.shape, how[name], seed=0).to(device).requires_grad_()
        for name, p in embedding.named_parameters()
    }
    return Parameters(**values)


def both_ways(rows, ids: Tensor, p: Parameters, grad: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(rows(ids, p), p, grad)


def per_unique_id(report: Report, width: int, rounds: int, device: torch.device) -> None:
    """Measures time per id at N = 1,024, and peak memory at 1,024 and 8,192."""
    p = parameters(width, device)
    ids = torch.randperm(VOCABULARY, device=device)[:8192]
    grad = torch.randn(8192, width, device=device)

    def ours(n: int = 1024) -> None:
        both_ways(lev_vectors, ids[:n], p, grad[:n])

    def literal(n: int = 1024) -> None:
        both_ways(reference_vectors, ids[:n], p, grad[:n])

    times = paired(ours, literal, rounds, device)
    per_id = [(a / 1024 * 1e6, b / 1024 * 1e6) for a, b in times]
    case = f"forward+backward an id, N 1024, D {width}"
    report.compare(case, per_id, LITERAL, "µs", "≥ 3.5")
    few = (peak_megabytes(ours, device), peak_megabytes(literal, device))
    report.compare(f"peak extra memory, N 1024, D {width}", [few], LITERAL, "MB", "≤ 1.0")
    many = peak_megabytes(lambda: ours(8192), device)
    report.figure(f"peak extra memory, N 8192, D {width}", many, "MB", at_most=300)


def text(report: Report, width: int, rounds: int, device: torch.device) -> None:
    """Compares distinct ids with a lookup to the direct implementation per token, on text."""
    p = parameters(width, device)
    ids, source = text_batch()
    ids = ids.flatten().to(device)
    distinct, places = ids.unique(return_inverse=True)
    grad = torch.randn(ids.numel(), width, device=device)

    def ours() -> None:
        rows = torch.nn.functional.embedding(places, lev_vectors(distinct, p))
        torch.autograd.grad(rows, p, grad)

    pairs = paired(ours, lambda: both_ways(reference_vectors, ids, p, grad), rounds, device)
    milliseconds = [(a * 1e3, b * 1e3) for a, b in pairs]
    case = f"8×512 tokens, {source}, {len(distinct)} distinct, D {width}"
    report.compare(case, milliseconds, "literal, per token", "ms", "≥ 9")


def knots(report: Report, rounds: int, device: torch.device) -> None:
    """Compares the factors of 128 ids and one head from three rows of Δ to all knots."""
    ids, d, count, r = 128, 128, 16, 64
    table = torch.randn(d, count, r, device=device)
    places = torch.randint(1, count - 1, (d, ids, 1), device=device) + torch.arange(
        -1, 2, device=device
    )
    values = torch.rand(d, ids, 3, device=device)
    basis = torch.zeros(d, ids, count, device=device)

    def sparse() -> Tensor:
        rows = places + (torch.arange(d, device=device) * count).view(d, 1, 1)
        flat = (rows.view(-1, 3), table.view(-1, r))
        return F.embedding_bag(*flat, per_sample_weights=values.view(-1, 3), mode="sum")

    def dense() -> Tensor:
        return torch.bmm(basis.zero_().scatter_(2, places, values), table)

    torch.testing.assert_close(sparse().view(d, ids, r), dense(), rtol=1e-5, atol=1e-5)
    with single_thread():  # as in each worker of the blocked path
        pairs = paired(sparse, dense, rounds * 10, device)
    micro = [(a / ids * 8e6, b / ids * 8e6) for a, b in pairs]
    report.compare("splines an id, 8 heads, one thread", micro, "over all knots", "µs", "≥ 1")


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Limits torch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def on_device(report: Report, device: torch.device, rounds: int) -> None:
    """Measures 8,192 ids at the largest width against a bound in milliseconds."""
    p, grad = parameters(2048, device), torch.randn(8192, 2048, device=device)
    ids = torch.randperm(VOCABULARY, device=device)[:8192]

    def ours() -> None:
        both_ways(lev_vectors, ids, p, grad)

    times = sorted(a for a, _ in paired(ours, ours, max(5, rounds), device))
    report.figure("forward+backward, N 8192, D 2048", times[len(times) // 2] * 1e3, "ms", 3)


def main() -> None:
    """Command line."""
    options = arguments(__doc__ or "", rounds=7).parse_args()
    device = ready(options.device)
    report = Report("lev", options.json)
    widths = (640, 1024, 2048) if device.type == "cuda" else (256, 1024)
    for width in widths:
        per_unique_id(report, width, options.rounds, device)
    text(report, widths[0], min(options.rounds, 5), device)
    if device.type == "cpu":
        knots(report, options.rounds, device)
    else:
        on_device(report, device, options.rounds)


if __name__ == "__main__":
    main()
