"""The DeepSpeed engine on two ranks, against a bare torch loop in one process.

One launch runs everything: a cold start of two ranks costs more than all the steps.
"""

import itertools
import json
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from leviathan.config.plan import RunPlan
from leviathan.config.schema import RunConfig
from leviathan.data.stream import IGNORE, Batch
from leviathan.engine import build_engine
from leviathan.errors import CheckpointError, ConfigError
from leviathan.model.transformer import CausalLM
from leviathan.optim import lr_at
from leviathan.parallel.launch_env import read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh
from leviathan.train.loop import new_model

STEPS, ROWS, MICRO, SEQ = 4, 6, 2, 16  # 6 rows on 2 ranks in micro-batches of 2: accumulation 2

# fp32 sums in another order (two ranks, partitioned norms): seen 1.5e-7 relative, which is one unit
# in the last place, for losses and norms.
FP32_TOLERANCE = 2e-6
# Adam divides by √v, so where gradients are near zero their rounding is a larger share of an update
# of size lr = 1e-2. Seen: 7e-6.
WEIGHT_TOLERANCE = 5e-5
# Nats of one token, from weights that differ by up to WEIGHT_TOLERANCE.
SCORE_TOLERANCE = 5e-4
# bf16 keeps 8 bits, so one rounding is 4e-3 of a value; averaged over all targets the loss of about
# 4 nats was seen to differ by 3e-3.
BF16_LOSS_TOLERANCE = 2e-2

TIED = {"kind": "tied"}
LEVIATHAN = {"kind": "leviathan", "d_seed": 8, "heads": 2, "knots": 4, "rank": 4}


def config(tmp_path, embedding, stage=1, precision="fp32", **extra):
    return RunConfig.model_validate(
        {
            "run_dir": str(tmp_path),
            "seed": 7,
            "data": {"path": str(tmp_path / "data")},
            "model": {
                "d_model": 16,
                "n_layers": 2,
                "n_heads": 2,
                "d_ff": 32,
                "seq_len": SEQ,
                "vocab_size": 61,
                "padded_vocab_size": 64,
                "embedding": embedding,
            },
            "train": {"steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": MICRO},
            "optim": {"lr": 1e-2, "warmup_steps": 2, "grad_clip": 0.5, "weight_decay": 0.1},
            "engine": {
                "kind": "deepspeed",
                "zero_stage": stage,
                "precision": precision,
                "extra": extra,
            },
        }
    )


def rows_of(step):
    """A global batch [ROWS, SEQ]; some targets are masked, unequally over rows."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (ROWS, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, SEQ - 2 * row :] = IGNORE if row else targets[row, SEQ:]
    return tokens[:, :-1], targets


def batched(rows):
    return [rows[i : i + MICRO] for i in range(0, len(rows), MICRO)]


def batches(step, rank, ranks):
    """This rank's micro-batches: rows cut unevenly where need be, filled up to whole ones."""
    inputs, targets = rows_of(step)
    mine = list(range(ROWS * rank // ranks, ROWS * (rank + 1) // ranks))
    per_rank = MICRO * math.ceil(math.ceil(ROWS / ranks) / MICRO)
    made = []
    for chunk in batched(mine + [-1] * (per_rank - len(mine))):
        ids = torch.stack([inputs[row] for row in chunk])
        wanted = torch.stack(
            [targets[row] if row >= 0 else torch.full((SEQ,), IGNORE) for row in chunk]
        )
        unique, inverse = ids.unique(return_inverse=True)
        made.append(Batch(ids, wanted, unique, inverse, tuple(chunk)))
    return made


def bare_loop(run):
    """The same training by nothing but torch, in one process."""
    model = new_model(run)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=run.optim.betas,
        eps=run.optim.eps,
    )
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = rows_of(step)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(run.optim, STEPS, step)
        loss = model(inputs, targets) / (targets != IGNORE).sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def advance(engine, run, mesh, first, last):
    stats = [
        engine.train_step(batches(step, mesh.dp_rank, mesh.dp), lr_at(run.optim, STEPS, step))
        for step in range(first, last)
    ]
    return [s.loss for s in stats], [s.grad_norm for s in stats]


def whole_state(engine):
    states = engine.iter_full_state()
    return {s.name: torch.stack([s.weight, s.exp_avg, s.exp_avg_sq]) for s in states}


def build(run, mesh):
    return build_engine(lambda: new_model(run), RunPlan(run, mesh.world_size), mesh)


def check_parity(tmp_path, mesh):
    for embedding, stage in itertools.product([TIED, LEVIATHAN], [0, 1, 2, 3]):
        run = config(tmp_path, embedding, stage)
        label = f"{embedding['kind']}, ZeRO-{stage}"
        losses, norms, weights = bare_loop(run)
        engine = build(run, mesh)
        found_losses, found_norms = advance(engine, run, mesh, 0, STEPS)
        assert found_losses == pytest.approx(losses, rel=FP32_TOLERANCE), label
        assert found_norms == pytest.approx(norms, rel=FP32_TOLERANCE), label
        state = whole_state(engine)
        assert state.keys() == weights.keys()
        for name, weight in weights.items():
            worst = float((state[name][0] - weight).abs().max())
            assert worst < WEIGHT_TOLERANCE, f"{label}: {name} differs by {worst}"
        check_score(engine, mesh, weights, run)


def check_score(engine, mesh, weights, run):
    model = new_model(run)
    model.load_state_dict({**model.state_dict(), **weights}, strict=False)
    batch = batches(9, mesh.dp_rank, mesh.dp)[0]
    expected = model.score(batch.input_ids, batch.targets).nll
    found = engine.score(batch)
    assert found.nll.shape == batch.input_ids.shape
    assert float((found.nll - expected).abs().max()) < SCORE_TOLERANCE
    assert not found.nll.requires_grad


def check_resume(tmp_path, mesh):
    """Two steps, save, two more = load into a fresh engine, two more: to the last bit."""
    for stage, precision in [(1, "fp32"), (0, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")]:
        label = f"ZeRO-{stage} {precision}"
        run = config(tmp_path, LEVIATHAN, stage, precision)
        folder = tmp_path / f"saved-{stage}-{precision}"
        engine = build(run, mesh)
        advance(engine, run, mesh, 0, 2)
        save(engine, folder, mesh)
        undisturbed = advance(engine, run, mesh, 2, STEPS)
        expected = whole_state(engine)
        resumed = build(run, mesh)
        resumed.load(folder)
        assert resumed.optimizer_steps == 2
        assert advance(resumed, run, mesh, 2, STEPS) == undisturbed, label
        for name, found in whole_state(resumed).items():
            assert torch.equal(found, expected[name]), f"{label}: {name}"


def save(engine, folder, mesh):
    if mesh.rank == 0:
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"optimizer_steps": engine.optimizer_steps}))
    mesh.any(False)
    engine.save(folder).wait()


def check_other_stage(tmp_path, mesh):
    """What ZeRO-1 saved goes on under every other stage with the same weights and moments."""
    source = build(config(tmp_path, LEVIATHAN, 1), mesh)
    source.load(tmp_path / "saved-1-fp32")
    expected = whole_state(source)
    for stage in (0, 2, 3):
        run = config(tmp_path, LEVIATHAN, stage)
        engine = build(run, mesh)
        engine.load(tmp_path / "saved-1-fp32")
        for name, found in whole_state(engine).items():
            assert torch.equal(found, expected[name]), f"ZeRO-{stage}: {name}"
        advance(engine, run, mesh, 2, STEPS)


def check_other_model(tmp_path, mesh):
    engine = build(config(tmp_path, TIED), mesh)
    with pytest.raises(CheckpointError, match="another model"):
        engine.load(tmp_path / "saved-1-fp32")


def check_refused_keys(tmp_path, mesh):
    for extra, named in [
        ({"zero_optimization": {"bad_key": 1}}, "bad_key"),
        ({"zero_optimization": {"overlap_comm": "maybe"}}, "overlap_comm"),
        ({"data_types": {"grad_accum_dtype": "int3"}}, "int3"),
    ]:
        with pytest.raises(ConfigError, match=rf"engine\.extra: DeepSpeed cannot .*{named}"):
            build(config(tmp_path, TIED, **extra), mesh)


def check_skipping(tmp_path, mesh):
    """A weight that is not finite on one rank only: nobody steps, and the next good step does."""
    for stage, precision in itertools.product([0, 1, 2, 3], ["fp32", "bf16"]):
        label = f"ZeRO-{stage} {precision}"
        run = config(tmp_path, TIED, stage, precision)
        engine = build(run, mesh)
        advance(engine, run, mesh, 0, 1)
        before = whole_state(engine)
        with poisoned(mesh.rank == 1):
            stats = engine.train_step(batches(1, mesh.dp_rank, mesh.dp), 1e-2)
        assert stats.skipped, label
        for name, found in whole_state(engine).items():
            assert torch.equal(found, before[name]), f"{label}: {name}"
        good = engine.train_step(batches(2, mesh.dp_rank, mesh.dp), 1e-2)
        assert not good.skipped, label
        assert math.isfinite(good.loss)
        assert engine.optimizer_steps == 2


@contextmanager
def poisoned(active):
    """Makes every loss infinite on this rank."""
    forward = CausalLM.forward
    if active:
        CausalLM.forward = lambda model, *a, **k: forward(model, *a, **k) * math.inf
    try:
        yield
    finally:
        CausalLM.forward = forward


def check_bf16(tmp_path, mesh):
    for stage in (0, 1, 2, 3):
        run = config(tmp_path, LEVIATHAN, stage, "bf16")
        losses, _, _ = bare_loop(run)
        found, _ = advance(build(run, mesh), run, mesh, 0, STEPS)
        assert found == pytest.approx(losses, abs=BF16_LOSS_TOLERANCE), f"ZeRO-{stage}"


def on_each_rank(folder, *checks):
    mesh = init_mesh(read_launch_env(), tp=1)
    torch.set_num_threads(1)
    try:
        for check in checks:
            check(Path(folder), mesh)
    finally:
        leave_mesh()


def test_two_ranks_equal_one_process_and_resume_bit_for_bit(tmp_path):
    checks = [check_parity, check_resume, check_other_stage, check_other_model, check_skipping]
    checks += [check_refused_keys, check_bf16]
    run_ranks(on_each_rank, 2, str(tmp_path), *checks, timeout=400)
