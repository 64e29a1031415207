"""Materializing LEV's table, compared with its multiply-adds at the speed of a large product.

python benchmarks/materialize.py [--json] [--rounds N] [--device cuda]
"""

import torch
from harness import Report, arguments, paired, ready, seconds

from leviathan.config.run import ModelConfig
from leviathan.model.embeddings import build_embedding
from leviathan.model.init import draw_values

VOCABULARY = 200_376
SIDE = 4096  # of the square matrix product that measures the machine's speed


def measure(report: Report, width: int, rounds: int, device: torch.device) -> None:
    """Measures one width."""
    shape = {"d_model": width, "n_layers": 1, "n_heads": 1, "vocab_size": VOCABULARY}
    config = ModelConfig.model_validate(shape | {"embedding": {"kind": "leviathan"}})
    embedding = build_embedding(config)
    how = embedding.init_spec(config)
    with torch.no_grad():
        for name, parameter in embedding.named_parameters():
            parameter.copy_(draw_values(name, parameter.shape, how[name], seed=0))
    embedding = embedding.to(device)
    products = config.embedding.multiply_adds(config.d_model) * VOCABULARY
    a, b = torch.randn(2, SIDE, SIDE, device=device)
    out = torch.empty_like(a)
    repeats = max(1, round(products / SIDE**3 / 8))  # an eighth of the lower bound is long enough

    def floor() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    seconds(embedding.materialize, device)
    pairs = paired(embedding.materialize, floor, rounds, device, warm=False)
    scale = products / (repeats * SIDE**3)
    case = f"{VOCABULARY} × {width} table"
    pairs = [(ours, other * scale) for ours, other in pairs]
    report.compare(case, pairs, "dense multiply-adds at mm speed", "s", "≤ 3")
    if device.type == "cuda" and width == 2048:
        report.figure(case, sorted(ours for ours, _ in pairs)[len(pairs) // 2] * 1e3, "ms", 10)


def main() -> None:
    """Command line."""
    options = arguments(__doc__ or "", rounds=3).parse_args()
    device = ready(options.device)
    report = Report("materialize", options.json)
    for width in (640, 1024, 2048) if device.type == "cuda" else (1024,):
        measure(report, width, options.rounds, device)


if __name__ == "__main__":
    main()
