"""Compares a training step with litgpt's: same shape, weights and batch; tokens per second.

    python benchmarks/peer.py [--json] [--rounds N] [--device cuda] [--rows N]

Requires `pip install litgpt lightning jsonargparse`. The other side is the step of `litgpt
pretrain` with its components `GPT`, `chunked_cross_entropy`, clipping and AdamW, without
compilation and compiled, as litgpt does. The two losses are compared first to verify that both
perform the same work.
"""

import argparse
import statistics
from typing import Any

import torch
from harness import Report, Work, arguments, paired, ready
from run import one_batch, run_config, scratch, world
from torch import Tensor, nn

try:
    from litgpt import GPT, Config  # pyright: ignore[reportMissingImports]
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise SystemExit(
        f"error: litgpt is missing ({error}): pip install litgpt lightning jsonargparse"
    ) from None

from leviathan.config.plan import RunPlan
from leviathan.config.run import ModelConfig, OptimConfig
from leviathan.data.loader import Batch
from leviathan.engine import build_engine
from leviathan.parallel.mesh import Mesh
from leviathan.train.loop import new_model

LR = 1e-4
SHAPE = "60m-50k"
SAME = 1e-4  # nats; fp32 sums in a different order


def their_model(config: ModelConfig, state: dict[str, Tensor]) -> nn.Module:
    """Builds litgpt's Llama with a tied head and our weights."""
    model = GPT(
        Config(
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_query_groups=config.n_kv_heads,
            n_embd=config.d_model,
            intermediate_size=config.d_ff,
            block_size=config.seq_len,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.padded_vocab_size,
            rotary_percentage=1.0,
            rope_base=int(config.rope_theta),
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.norm_eps,
            mlp_class_name="LLaMAMLP",
        )
    )
    theirs = {
        "transformer.wte.weight": state["model.embed_tokens.weight"],
        "lm_head.weight": state["model.embed_tokens.weight"],
        "transformer.ln_f.weight": state["model.norm.weight"],
    }
    for number in range(config.n_layers):
        ours, block = f"model.layers.{number}", f"transformer.h.{number}"
        queries = [state[f"{ours}.self_attn.{name}_proj.weight"] for name in "qkv"]
        theirs |= {
            f"{block}.norm_1.weight": state[f"{ours}.input_layernorm.weight"],
            f"{block}.attn.qkv.weight": torch.cat(queries),
            f"{block}.attn.proj.weight": state[f"{ours}.self_attn.o_proj.weight"],
            f"{block}.norm_2.weight": state[f"{ours}.post_attention_layernorm.weight"],
            f"{block}.mlp.fc_1.weight": state[f"{ours}.mlp.gate_proj.weight"],
            f"{block}.mlp.fc_2.weight": state[f"{ours}.mlp.up_proj.weight"],
            f"{block}.mlp.proj.weight": state[f"{ours}.mlp.down_proj.weight"],
        }
    model.load_state_dict(theirs)
    model.transformer.wte.weight = model.lm_head.weight
    return model


@torch.no_grad()
def their_loss(model: nn.Module, config: ModelConfig, batch: Batch) -> float:
    """Loss over the vocabulary without padding, which litgpt keeps in the softmax."""
    logits = model(batch.input_ids)[..., : config.vocab_size]
    return float(chunked_cross_entropy(logits, batch.targets))


def their_step(model: nn.Module, optim: OptimConfig, batch: Batch, compiled: bool) -> Work:
    """Step of litgpt's training loop; its optimizer is fused only on a GPU."""
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        weights,
        lr=LR,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        fused=batch.input_ids.is_cuda,
    )
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        loss = chunked_cross_entropy(forward(batch.input_ids), batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(kind: str, compiled: bool, options: argparse.Namespace, mesh: Mesh) -> Any:
    """Returns a step of our engine as in the training loop, its configuration and its batch."""
    chosen = {"kind": "fsdp2", "compile": compiled}
    config = run_config(scratch(), chosen, options.rows, kind=kind)
    batch = one_batch(config).to(mesh.device)
    engine = build_engine(lambda: new_model(config), RunPlan(config, 1), mesh)
    return lambda: engine.train_step([batch], LR), config, batch


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=7)
    parser.add_argument("--rows", type=int, default=8, help="sequences per step (default: 8)")
    options = parser.parse_args()
    device, report, mesh = ready(options.device), Report("peer", options.json), world()
    for compiled in (False, True):
        how = ", compiled" if compiled else ""
        ours, config, batch = our_step("tied", compiled, options, mesh)
        other = their_model(config.model, new_model(config).state_dict()).to(device)
        loss = their_loss(other, config.model, batch)
        report.equal(f"loss of step 1{how}", ours().loss, loss, "litgpt", "nats", SAME)
        theirs = their_step(other, config.optim, batch, compiled)
        for kind in ("tied", "leviathan"):
            if kind != "tied":
                ours, *_ = our_step(kind, compiled, options, mesh)
            pairs = paired(ours, theirs, options.rounds, device)
            report.compare(f"step, {kind}{how}, {SHAPE}", pairs, f"litgpt{how}", "s", "≥ 1.0")
            median = statistics.median(mine for mine, _ in pairs)
            report.figure(f"{kind}{how}, {SHAPE}", batch.input_ids.numel() / median, "tokens/s")


if __name__ == "__main__":
    main()
