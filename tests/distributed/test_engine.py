"""Both engines on two ranks and on one, against a bare torch loop: the parity matrix."""

import itertools

import pytest
from engine_cases import (
    ALBERT,
    ENGINES,
    GROUPS,
    LEVIATHAN,
    TIED,
    build,
    config,
    on_each_rank,
    whole_state,
)
from engine_checks import (
    BF16,
    check_equals_bare_loop,
    check_nears_bare_loop,
    check_resumes_in_place,
    check_skips,
)
from errors import raises_error
from ranks import run_ranks

from leviathan.train.loop import new_model

KINDS = [TIED, ALBERT, LEVIATHAN]


def check_parity(tmp_path, mesh):
    """{FSDP2, ZeRO 0–3} × {tied, albert, leviathan}, accumulation 2, clipping, unequal ranks."""
    for embedding, engine in itertools.product(KINDS, ENGINES):
        check_equals_bare_loop(config(tmp_path, embedding, engine), mesh)


def check_variants(tmp_path, mesh):
    """Settings that change where and when values are computed, but not the values."""
    for engine in (
        {"kind": "fsdp2", "activation_checkpointing": True},
        {"kind": "fsdp2", "dp_replicate": 2},
        {"kind": "deepspeed", "zero_stage": 2, "activation_checkpointing": True},
        {"kind": "deepspeed", "zero_stage": 3, "activation_checkpointing": True},
        {"kind": "deepspeed", "zero_stage": 1, "offload_optimizer": True},
        {"kind": "deepspeed", "zero_stage": 3, "offload_optimizer": True},
    ):
        check_equals_bare_loop(config(tmp_path, LEVIATHAN, engine), mesh)


def check_groups(tmp_path, mesh):
    """Rates, decay, betas and clipping by parameter group."""
    engines = [*ENGINES.values(), {"kind": "deepspeed", "zero_stage": 2, "offload_optimizer": True}]
    for engine in engines:
        run = config(tmp_path, LEVIATHAN, engine, groups=GROUPS)
        check_equals_bare_loop(run, mesh)
        check_resumes_in_place(run, mesh)


def check_compiled(tmp_path, mesh):
    for engine in (
        {"kind": "fsdp2"},
        {"kind": "fsdp2", "activation_checkpointing": True},
        {"kind": "deepspeed", "zero_stage": 1},
        {"kind": "deepspeed", "zero_stage": 3},
    ):
        run = config(tmp_path, LEVIATHAN, {**engine, "compile": True})
        check_equals_bare_loop(run, mesh)


def check_step_zero(tmp_path, mesh):
    """The same weights at step 0, bitwise, whatever the engine and the precision."""
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
        with raises_error("engine.invalid_extra", named):
            build(config(tmp_path, TIED, {"kind": "deepspeed", "extra": extra}), mesh)
    with raises_error("parallel.indivisible", "engine.dp_replicate=3", "2 data-parallel"):
        build(config(tmp_path, TIED, {"kind": "fsdp2", "dp_replicate": 3}), mesh)


def check_skipping(tmp_path, mesh):
    for engine, precision in itertools.product(ENGINES.values(), [{}, BF16]):
        check_skips(config(tmp_path, TIED, {**engine, **precision}), mesh)


def check_bf16(tmp_path, mesh):
    for embedding, engine in itertools.product(KINDS, ENGINES.values()):
        check_nears_bare_loop(config(tmp_path, embedding, {**engine, **BF16}), mesh)


def test_every_engine_equals_one_process(tmp_path):
    checks = [check_parity, check_variants, check_groups, check_step_zero, check_skipping]
    run_ranks(on_each_rank, 2, str(tmp_path), *checks, check_refused, check_bf16, timeout=500)


def test_one_rank_is_enough(tmp_path):
    run_ranks(on_each_rank, 1, str(tmp_path), check_parity)


@pytest.mark.heavy
def test_compiled_blocks_compute_the_same(tmp_path):
    run_ranks(on_each_rank, 2, str(tmp_path), check_compiled, timeout=580)
