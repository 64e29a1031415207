"""Compares an optimizer step of leviathan and tied with the same body, and measures its parts.

    python benchmarks/step.py [--json] [--rounds N] [--device cuda] [--shape NAME …]

On the CPU a step at the 60M-like shape takes about 20 s at 200k ids and 7 s at 50k.
"""

import statistics
from collections.abc import Callable

import torch
from batch import text_batch
from harness import Report, arguments, paired, peak_megabytes, ready, seconds
from torch import Tensor, nn

from leviathan.config.run import ModelConfig, OptimConfig
from leviathan.estimate.params import count_params
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.optim import build_optimizer
from leviathan.train.metrics import device_peak_flops

SHAPES = {  # D, layers, heads, ids, padding; samples of 512 tokens
    "60m-50k": (256, 6, 4, 50_257, 50_304, 8),
    "60m-200k": (256, 6, 4, 200_019, 200_376, 8),
    "200m": (640, 12, 10, 200_019, 200_376, 32),
    "400m": (1024, 12, 16, 200_019, 200_376, 32),
    "1.2b": (2048, 12, 32, 200_019, 200_376, 32),
}
CPU_SHAPES, CUDA_SHAPES = ("60m-50k", "60m-200k"), ("200m", "400m", "1.2b")
SHARES = {"60m-50k": 10}  # maximum percentage of the step for the input embedding; otherwise 5


class Arm:
    """A model and its optimizer on one batch."""

    def __init__(self, shape: str, kind: str, device: torch.device) -> None:
        width, layers, heads, vocabulary, padded, rows = SHAPES[shape]
        config = ModelConfig.model_validate(
            {"d_model": width, "n_layers": layers, "n_heads": heads, "seq_len": 512}
            | {"vocab_size": vocabulary, "padded_vocab_size": padded, "embedding": {"kind": kind}}
        )
        model = CausalLM(config)
        init_weights(model, config, seed=0)
        # On CUDA as in training: bf16 weights; the optimizer's work is the same.
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.optimizer = build_optimizer(self.model, OptimConfig())
        ids, self.source = text_batch(rows)
        self.ids = (ids % vocabulary).to(device)
        self.targets = self.ids.roll(-1, 1)
        self.unique, self.inverse = self.ids.unique(return_inverse=True)

    @property
    def state(self) -> float:
        """MB of weights and both moments."""
        return sum(t.nbytes for t in self.model.parameters()) * 3 / 1e6

    def step(self) -> None:
        """Forward, backward, clipping, AdamW."""
        loss = self.model(self.ids, self.targets, self.unique, self.inverse)
        (loss / self.targets.numel()).backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Clipping and AdamW on the current gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def parts(self) -> dict[str, Callable[[], None]]:
        """Returns the parts of the step as separate functions."""
        decoder, width = self.model.model, self.model.config.d_model
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(*self.ids.shape, width, device=self.ids.device, dtype=dtype)

        def embedding() -> None:
            rows = decoder.embed_tokens(self.ids, self.unique, self.inverse)
            rows.backward(x)

        def body() -> None:
            self._body(x.clone().requires_grad_()).backward(x)

        def head() -> None:
            self.model.lm_head(x.clone().requires_grad_(), self.targets).backward()

        return {
            "input embedding": embedding,
            "body": body,
            "output head and loss": head,
            "clipping and AdamW": self.update,
        }

    def _body(self, x: Tensor) -> Tensor:
        from leviathan.model.transformer import rotary

        decoder = self.model.model
        cos, sin = (t.to(x.dtype) for t in rotary(x.shape[1], self.model.config, x.device))
        for layer in decoder.layers:
            x = layer(x, cos, sin)
        return decoder.norm(x)


def measure(report: Report, shape: str, rounds: int, device: torch.device) -> None:
    """Measures time and memory of both arms, and the parts of leviathan's step."""
    ours, tied = (Arm(shape, kind, device) for kind in ("leviathan", "tied"))
    # The first step allocates the optimizer's moments; the second is a typical step.
    ours.step()
    tied.step()
    memory = [  # the memory that the allocator retains varies between steps
        (
            peak_megabytes(ours.step, device) + ours.state,
            peak_megabytes(tied.step, device) + tied.state,
        )
        for _ in range(5)
    ]
    pairs = paired(ours.step, tied.step, rounds, device, warm=False)
    goal = "≤ 1.02" if shape == "400m" and device.type == "cuda" else "≤ 1.3"
    tokens = ours.ids.numel()
    case = f"step, {shape}, {tokens} tokens, {ours.source}"
    report.compare(case, pairs, "tied", "s", goal)
    report.compare(f"peak memory, {shape}", memory, "tied", "MB", "≤ 1.05")
    step = statistics.median(a for a, _ in pairs)
    theirs = statistics.median(b for _, b in pairs)
    for arm, kind, taken in ((ours, "leviathan", step), (tied, "tied", theirs)):
        report.figure(f"{kind}, {shape}", tokens / taken, "tokens/s")
        if peak := device_peak_flops():
            size = count_params(arm.model.config)
            # Excluded: LEV's FLOPs are counted per token but computed per distinct id.
            work = (size.flops_per_token - size.input_embedding_flops_per_token) * tokens
            used = work / taken / peak
            goal_of_mfu = 50 if shape == "1.2b" else None
            report.figure(f"MFU, {kind}, {shape}", 100 * used, "%", at_least=goal_of_mfu)
    for name, part in ours.parts().items():
        part()  # warms up, and computes gradients for the optimizer
        times = [seconds(part, device) for _ in range(min(rounds, 3))]
        bound = SHARES.get(shape, 5) if name == "input embedding" else None
        share = statistics.median(times) / step * 100
        report.figure(f"share of the step, {shape}: {name}", share, "%", bound)


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument(
        "--shape", nargs="*", choices=SHAPES, help="shapes to measure (default: all for the device)"
    )
    options = parser.parse_args()
    device = ready(options.device)
    report = Report("step", options.json)
    for shape in options.shape or (CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES):
        measure(report, shape, options.rounds, device)


if __name__ == "__main__":
    main()
