"""LEV forward and backward against its literal reading, at d 128, h 8, κ 16, r 64.

python benchmarks/lev.py [--json] [--rounds N] [--device cuda]
"""

import torch
from batch import text_batch
from harness import Report, arguments, paired, peak_megabytes, ready
from torch import Tensor

from leviathan.config.schema import ModelConfig
from leviathan.model.embedding import build_embedding
from leviathan.model.init import draw
from leviathan.model.kernels.lev import Parameters, lev_rows
from leviathan.model.kernels.reference import reference_rows

VOCABULARY = 200_376
LITERAL = "literal, prod over factors"


def parameters(width: int, device: torch.device) -> Parameters:
    """LEV's initial parameters for D = `width`."""
    shape = {"d_model": width, "n_layers": 1, "n_heads": 1, "vocab_size": VOCABULARY}
    config = ModelConfig.model_validate(shape | {"embedding": {"kind": "leviathan"}})
    embedding = build_embedding(config)
    how = embedding.initial(config)
    values = {
        name: draw(name, p.shape, how[name], seed=0).to(device).requires_grad_()
        for name, p in embedding.named_parameters()
    }
    return Parameters(**values)


def both_ways(rows, ids: Tensor, p: Parameters, grad: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(rows(ids, p), p, grad)


def per_unique_id(report: Report, width: int, rounds: int, device: torch.device) -> None:
    """Time an id at N = 1,024, and peak memory at 1,024 and 8,192."""
    p = parameters(width, device)
    ids = torch.randperm(VOCABULARY, device=device)[:8192]
    grad = torch.randn(8192, width, device=device)

    def ours(n: int = 1024) -> None:
        both_ways(lev_rows, ids[:n], p, grad[:n])

    def literal(n: int = 1024) -> None:
        both_ways(reference_rows, ids[:n], p, grad[:n])

    times = paired(ours, literal, rounds, device)
    per_id = [(a / 1024 * 1e6, b / 1024 * 1e6) for a, b in times]
    case = f"forward+backward an id, N 1024, D {width}"
    report.compare(case, per_id, LITERAL, "µs", "≥ 3.5")
    few = (peak_megabytes(ours, device), peak_megabytes(literal, device))
    report.compare(f"peak extra memory, N 1024, D {width}", [few], LITERAL, "MB", "≤ 1.0")
    many = peak_megabytes(lambda: ours(8192), device)
    report.figure(f"peak extra memory, N 8192, D {width}", many, "MB", at_most=300)


def text(report: Report, width: int, rounds: int, device: torch.device) -> None:
    """A batch of text: distinct ids and a look-up, against the literal reading for each token."""
    p = parameters(width, device)
    ids, source = text_batch()
    ids = ids.flatten().to(device)
    distinct, places = ids.unique(return_inverse=True)
    grad = torch.randn(ids.numel(), width, device=device)

    def ours() -> None:
        rows = torch.nn.functional.embedding(places, lev_rows(distinct, p))
        torch.autograd.grad(rows, p, grad)

    pairs = paired(ours, lambda: both_ways(reference_rows, ids, p, grad), rounds, device)
    milliseconds = [(a * 1e3, b * 1e3) for a, b in pairs]
    case = f"8×512 tokens, {source}, {len(distinct)} distinct, D {width}"
    report.compare(case, milliseconds, "literal, per token", "ms", "≥ 9")


def on_device(report: Report, device: torch.device, rounds: int) -> None:
    """8,192 ids at the largest width, held to milliseconds."""
    p, grad = parameters(2048, device), torch.randn(8192, 2048, device=device)
    ids = torch.randperm(VOCABULARY, device=device)[:8192]

    def ours() -> None:
        both_ways(lev_rows, ids, p, grad)

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
    if device.type == "cuda":
        on_device(report, device, options.rounds)


if __name__ == "__main__":
    main()
