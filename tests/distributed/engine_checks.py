"""Properties of every engine on any ranks; called by the tests of many layouts."""

import math
import zlib
from contextlib import contextmanager

import pytest
from engine_cases import (
    STEPS,
    advance,
    assert_equal_states,
    bare_loop,
    batches,
    build,
    save,
    whole_state,
)

from leviathan.model.transformer import CausalLM
from leviathan.train.loop import new_model

HALF, WHOLE = 3, 6

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

BF16 = {"precision": "bf16"}


def label_of(run, mesh):
    return f"{run.model.embedding} {run.engine} tp {mesh.tp}, {mesh.world_size} ranks"


def check_equals_bare_loop(run, mesh):
    """Losses, gradient norms, weights and scores of one process that trains with full batches."""
    label, expected = label_of(run, mesh), bare_loop(run)
    assert max(expected.norms) > run.optim.grad_clip, "nothing to clip"
    engine = build(run, mesh)
    losses, norms = advance(engine, run, mesh, 0, STEPS)
    assert losses == pytest.approx(expected.losses, rel=FP32_TOLERANCE), label
    assert norms == pytest.approx(expected.norms, rel=FP32_TOLERANCE), label
    state = whole_state(engine)
    assert state.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        worst = float((state[name][0] - weight).abs().max())
        assert worst < WEIGHT_TOLERANCE, f"{label}: {name} differs by {worst}"
    check_score(engine, mesh, expected.weights, run)


def check_score(engine, mesh, weights, run):
    """Scores, and that a step after scoring is unchanged by it."""
    model = new_model(run)
    model.load_state_dict({**model.state_dict(), **weights}, strict=False)
    batch = batches(9, mesh.dp_rank, mesh.dp)[0]
    expected = model.score(batch.input_ids, batch.targets).nll
    found = engine.score(batch)
    assert found.nll.shape == batch.input_ids.shape
    assert float((found.nll - expected).abs().max()) < SCORE_TOLERANCE
    assert not found.nll.requires_grad
    before = advance(engine, run, mesh, STEPS, STEPS + 1)
    assert math.isfinite(before[0][0])
    moved = engine.score(batch).nll
    assert not moved.equal(found.nll)


def check_skips(run, mesh):
    """A loss that is not finite on one rank only: no rank updates, and the next good step does."""
    label, engine = label_of(run, mesh), build(run, mesh)
    advance(engine, run, mesh, 0, 1)
    before = whole_state(engine)
    with poisoned(mesh.rank == 1):
        stats = engine.train_step(batches(1, mesh.dp_rank, mesh.dp), 1e-2)
    assert stats.skipped, label
    assert_equal_states(whole_state(engine), before, label)
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


def check_nears_bare_loop(run, mesh):
    """The losses of fp32, but for the rounding of bf16."""
    found, _ = advance(build(run, mesh), run, mesh, 0, STEPS)
    expected = bare_loop(run).losses
    assert found == pytest.approx(expected, abs=BF16_LOSS_TOLERANCE), label_of(run, mesh)


def check_resumes_in_place(run, mesh):
    """Bitwise equal to the uninterrupted run."""
    label = label_of(run, mesh)
    saved = run.run_dir / f"in-place-{zlib.crc32(label.encode())}"
    undisturbed = build(run, mesh)
    advance(undisturbed, run, mesh, 0, HALF)
    save(undisturbed, saved, mesh)
    expected = advance(undisturbed, run, mesh, HALF, WHOLE)
    resumed = build(run, mesh)
    resumed.load(saved)
    assert resumed.optimizer_steps == HALF
    assert advance(resumed, run, mesh, HALF, WHOLE) == expected, label
    assert_equal_states(whole_state(resumed), whole_state(undisturbed), label)
