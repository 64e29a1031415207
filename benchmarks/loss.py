"""Output head and loss, forward and backward, against full logits and `F.cross_entropy`.

python benchmarks/loss.py [--json] [--rounds N] [--device cuda]
"""

import torch
import torch.nn.functional as F
from harness import Report, arguments, paired, peak_megabytes, ready

from leviathan.model.head import _Part, _SummedCrossEntropy
from leviathan.model.tp_layout import NO_TP

VOCABULARY, PADDED = 200_019, 200_376


def compare(
    report: Report, tokens: int, width: int, rounds: int, device: torch.device, goals: bool
) -> None:
    """Measures time and memory; without `goals`, compares with torch's chunked loss."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(PADDED, width, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), device=device)

    def ours() -> None:
        loss = _SummedCrossEntropy.apply(hidden, weight, targets, _Part(0, VOCABULARY, NO_TP))
        torch.autograd.grad(loss, (hidden, weight))

    def plain() -> None:
        logits = F.linear(hidden, weight)[:, :VOCABULARY].float()
        torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), (hidden, weight))

    def chunked() -> None:
        chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256)
        loss = F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=chunks)
        torch.autograd.grad(loss, (hidden, weight))

    other, name = (
        (plain, "logits + F.cross_entropy") if goals else (chunked, "F.linear_cross_entropy")
    )
    shape = f"{tokens} tokens × {PADDED} × D {width}"
    memory = (peak_megabytes(ours, device), peak_megabytes(other, device))  # warms up both
    times = paired(ours, other, rounds, device, warm=False)
    bounds = ("≤ 0.25", "≤ 1.1") if goals else ("≤ 4", "≤ 1.1")
    report.compare(f"peak extra memory, {shape}", [memory], name, "MB", bounds[0])
    report.compare(f"forward+backward, {shape}", times, name, "s", bounds[1])


def main() -> None:
    """Command line."""
    options = arguments(__doc__ or "", rounds=3).parse_args()
    device = ready(options.device)
    report = Report("loss", options.json)
    compare(report, 512, 256, options.rounds, device, goals=False)
    widths = (640, 1024, 2048) if device.type == "cuda" else (512,)
    for width in widths:
        compare(report, 4096, width, options.rounds, device, goals=True)


if __name__ == "__main__":
    main()
