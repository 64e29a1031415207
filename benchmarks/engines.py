"""Compares a step of each engine on one process with a plain torch loop over the same model.

    python benchmarks/engines.py [--json] [--rounds N] [--device cuda] [--rows N]

Forward, backward, finite check, clipping, AdamW: the plain loop performs the same work in torch
without an engine.
"""

from harness import Report, Work, arguments, paired, ready
from run import one_batch, run_config, scratch, world
from torch.nn.utils import clip_grad_norm_

from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.data.loader import Batch
from leviathan.engine import build_engine
from leviathan.optim import build_optimizer
from leviathan.parallel.mesh import Mesh
from leviathan.train.loop import new_model

LR = 1e-4


def bare(config: RunConfig, batch: Batch, mesh: Mesh) -> Work:
    """A plain torch training step."""
    model = new_model(config).to(mesh.device)
    optimizer = build_optimizer(model, config.optim)
    batch = batch.to(mesh.device)
    for group in optimizer.param_groups:
        group["lr"] = LR

    def step() -> None:
        nll = model(batch.input_ids, batch.targets, batch.unique_ids, batch.inverse)
        (nll / batch.n_targets).backward()
        norm = clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument("--rows", type=int, default=8, help="sequences per step (default: 8)")
    options = parser.parse_args()
    device, report, mesh, folder = (
        ready(options.device),
        Report("engines", options.json),
        world(),
        scratch(),
    )
    engines = {
        "fsdp2": {"kind": "fsdp2"},
        "deepspeed, ZeRO-1": {"kind": "deepspeed", "zero_stage": 1},
        "deepspeed, ZeRO-3": {"kind": "deepspeed", "zero_stage": 3},
    }
    for name, chosen in engines.items():
        config = run_config(folder, chosen, options.rows)
        batch = one_batch(config)
        engine = build_engine(lambda config=config: new_model(config), RunPlan(config, 1), mesh)
        loop = bare(config, batch, mesh)

        def step(engine=engine, batch=batch) -> None:
            engine.train_step([batch], LR)

        pairs = paired(step, loop, options.rounds, device)
        case = f"step, {name}, 60m-50k, {batch.input_ids.numel()} tokens"
        report.compare(case, pairs, "bare torch loop", "s", "≤ 1.05")


if __name__ == "__main__":
    main()
