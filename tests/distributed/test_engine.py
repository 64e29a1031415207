"""Both engines on two ranks and on one, against a bare torch loop: the parity matrix."""

import itertools
import math
from contextlib import contextmanager

import pytest
from engine_cases import (
    ALBERT,
    ENGINES,
    LEVIATHAN,
    STEPS,
    TIED,
    advance,
    assert_equal_states,
    bare_loop,
    batches,
    build,
    config,
    on_each_rank,
    whole_state,
)
from ranks import run_ranks

from leviathan.errors import ConfigError
from leviathan.model.transformer import CausalLM
from leviathan.train.loop import new_model

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
KINDS = [TIED, ALBERT, LEVIATHAN]


def check_parity(tmp_path, mesh):
    """{FSDP2, ZeRO 0–3} × {tied, albert, leviathan}, accumulation 2, clipping, unequal ranks."""
    for embedding, engine in itertools.product(KINDS, ENGINES):
        check_equals_bare_loop(config(tmp_path, embedding, engine), mesh, engine)


def check_equals_bare_loop(run, mesh, label):
    label = f"{run.model.embedding.kind}, {label}, {mesh.world_size} ranks"
    expected = bare_loop(run)
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
    """Scores, and that a step after scoring is none the worse for it."""
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


def check_variants(tmp_path, mesh):
    """What changes where and when things are computed, but not what."""
    for engine in (
        {"kind": "fsdp2", "activation_checkpointing": True},
        {"kind": "fsdp2", "replicas": 2},
        {"kind": "deepspeed", "zero_stage": 2, "activation_checkpointing": True},
        {"kind": "deepspeed", "zero_stage": 3, "activation_checkpointing": True},
        {"kind": "deepspeed", "zero_stage": 1, "offload_optimizer": True},
        {"kind": "deepspeed", "zero_stage": 3, "offload_optimizer": True},
    ):
        check_equals_bare_loop(config(tmp_path, LEVIATHAN, engine), mesh, str(engine))


def check_compiled(tmp_path, mesh):
    for engine in (
        {"kind": "fsdp2"},
        {"kind": "fsdp2", "activation_checkpointing": True},
        {"kind": "deepspeed", "zero_stage": 1},
        {"kind": "deepspeed", "zero_stage": 3},
    ):
        run = config(tmp_path, LEVIATHAN, {**engine, "compile": True})
        check_equals_bare_loop(run, mesh, str(engine))


def check_step_zero(tmp_path, mesh):
    """The same weights at step 0, to the last bit, whatever the engine and the precision."""
    for embedding, engine, precision in itertools.product(KINDS, ENGINES.values(), [{}, BF16]):
        run = config(tmp_path, embedding, {**engine, **precision})
        state = whole_state(build(run, mesh))
        for name, weight in new_model(run).named_parameters():
            assert state[name][0].equal(weight), (engine, precision, name)


def check_refused(tmp_path, mesh):
    for extra, named in [
        ({"zero_optimization": {"bad_key": 1}}, "bad_key"),
        ({"zero_optimization": {"overlap_comm": "maybe"}}, "overlap_comm"),
        ({"data_types": {"grad_accum_dtype": "int3"}}, "int3"),
    ]:
        with pytest.raises(ConfigError, match=rf"engine\.extra: DeepSpeed cannot .*{named}"):
            build(config(tmp_path, TIED, {"kind": "deepspeed", "extra": extra}), mesh)
    with pytest.raises(ConfigError, match=r"engine\.replicas=3 does not divide the 2 data-para"):
        build(config(tmp_path, TIED, {"kind": "fsdp2", "replicas": 3}), mesh)


def check_skipping(tmp_path, mesh):
    """A loss that is not finite on one rank only: nobody steps, and the next good step does."""
    for engine, precision in itertools.product(ENGINES, [{}, BF16]):
        label = f"{engine} {precision}"
        run = config(tmp_path, TIED, {**ENGINES[engine], **precision})
        engine = build(run, mesh)
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


def check_bf16(tmp_path, mesh):
    for embedding, engine in itertools.product(KINDS, ENGINES):
        run = config(tmp_path, embedding, {**ENGINES[engine], **BF16})
        found, _ = advance(build(run, mesh), run, mesh, 0, STEPS)
        expected = bare_loop(run).losses
        assert found == pytest.approx(expected, abs=BF16_LOSS_TOLERANCE), (embedding, engine)


def test_every_engine_equals_one_process(tmp_path):
    checks = [check_parity, check_variants, check_step_zero, check_skipping, check_refused]
    run_ranks(on_each_rank, 2, str(tmp_path), *checks, check_bf16, timeout=500)


def test_one_rank_is_enough(tmp_path):
    run_ranks(on_each_rank, 1, str(tmp_path), check_parity)


@pytest.mark.heavy
def test_compiled_blocks_compute_the_same(tmp_path):
    run_ranks(on_each_rank, 2, str(tmp_path), check_compiled, timeout=580)
