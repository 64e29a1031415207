"""Tensor parallelism in the engines: training, skipping, saving and resuming as without it."""

import itertools
from functools import partial

import pytest
from engine_cases import (
    ALBERT,
    ENGINES,
    GROUPS,
    LEVIATHAN,
    TIED,
    advance,
    assert_equal_states,
    bare_loop,
    build,
    config,
    on_each_rank,
    save,
    whole_state,
)
from engine_checks import (
    BF16,
    WHOLE,
    check_equals_bare_loop,
    check_nears_bare_loop,
    check_resumes_in_place,
    check_skips,
)
from ranks import run_ranks

from leviathan.parallel.launch_env import read_launch_env
from leviathan.parallel.mesh import init_mesh

MODES = {mode: LEVIATHAN | {"heads": 4, "tp_mode": mode} for mode in ("replicated", "ids", "heads")}
OTHERS = [
    TIED,
    ALBERT,
    {"kind": "untied"},
    {"kind": "binary_codes"},
    {"kind": "flat_mlp", "target_params": 2000},
    {"kind": "factored_mlp", "d_seed": 8, "target_params": 2000},
    {"kind": "leviathan_v1", "d_seed": 8, "modes": 2, "knots": 5, "rank": 4},
]
KINDS = [*MODES.values(), *OTHERS]
IN_SHORT = ("FSDP2", "ZeRO-1")
# As in test_resume: fp32 sums in another order, after up to 5 updates.
LOSS_TOLERANCE = 5e-6


def check_kinds(tmp_path, mesh, engines=IN_SHORT):
    """Every kind in every way; so the three ways of LEV equal one another, too."""
    for embedding, engine in itertools.product(KINDS, engines):
        check_equals_bare_loop(config(tmp_path, embedding, engine, mesh.tp), mesh)


def check_variants(tmp_path, mesh):
    for engine in (
        {"kind": "fsdp2", "activation_checkpointing": True},
        {"zero_stage": 1, "activation_checkpointing": True},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True},
    ):
        run = config(tmp_path, MODES["ids"], engine, mesh.tp, z_loss=0.01)
        check_equals_bare_loop(run, mesh)
    for engine in IN_SHORT:
        run = config(tmp_path, MODES["heads"], engine, mesh.tp, groups=GROUPS)
        check_equals_bare_loop(run, mesh)


def check_replicas(tmp_path, mesh):
    """Copies of each cut part, as many as there are data-parallel ranks."""
    engine = {"kind": "fsdp2", "dp_replicate": mesh.dp}
    check_equals_bare_loop(config(tmp_path, MODES["ids"], engine, mesh.tp), mesh)
    check_resumes_in_place(config(tmp_path, MODES["heads"], engine, mesh.tp), mesh)


def check_compiled(tmp_path, mesh):
    for engine in ({"kind": "fsdp2", "activation_checkpointing": True}, {"zero_stage": 1}):
        run = config(tmp_path, MODES["heads"], {**engine, "compile": True}, mesh.tp)
        check_equals_bare_loop(run, mesh)


def check_copies(tmp_path, mesh, engines=IN_SHORT):
    """Whole parameters and their moments stay the same on all tensor-parallel ranks, bit by bit."""
    for embedding, name in itertools.product((MODES["ids"], MODES["heads"], ALBERT), engines):
        run = config(tmp_path, embedding, name, mesh.tp)
        engine = build(run, mesh)
        advance(engine, run, mesh, 0, 3)
        mine = {
            prefix + shard.name: held.clone()
            for shard in engine._state._shards
            if shard.chunk is None
            for prefix, held in shard.tensors(engine._adamw).items()
        }
        held = mesh.gather((mesh.dp_rank, mine))
        assert any(key.endswith("norm.weight") for _, theirs in held for key in theirs)
        for dp_rank, theirs in held:
            if dp_rank == mesh.dp_rank:
                assert_equal_states(theirs, mine, f"{embedding} {name}")


def check_step_zero(tmp_path, mesh):
    """The weights of step 0 are those without tensor parallelism, bit for bit."""
    for embedding, engine in itertools.product((TIED, MODES["heads"]), ENGINES.values()):
        for precision in ({}, BF16):
            run = config(tmp_path, embedding, {**engine, **precision}, mesh.tp)
            state, one = whole_state(build(run, mesh)), bare_loop(run, steps=0)
            for name, weight in one.weights.items():
                assert state[name][0].equal(weight), (run.engine, name)


def check_skipping(tmp_path, mesh, engines=IN_SHORT):
    for name, precision in itertools.product(engines, ({}, BF16)):
        check_skips(config(tmp_path, TIED, {**ENGINES[name], **precision}, mesh.tp), mesh)


def check_in_place(tmp_path, mesh, engines=IN_SHORT):
    for name in engines:
        check_resumes_in_place(config(tmp_path, MODES["heads"], name, mesh.tp), mesh)


def check_bf16(tmp_path, mesh):
    for embedding, engine in itertools.product((TIED, *MODES.values()), ENGINES.values()):
        check_nears_bare_loop(config(tmp_path, embedding, {**engine, **BF16}, mesh.tp), mesh)


# Each hop: engine, LEV's way under tensor parallelism (None: without it), steps up to which it
# trains. What the last one ends with must be what one process ends with.
JOURNEYS = {
    "and back": [("ZeRO-1", "ids", 2), ("ZeRO-1", None, 4), ("ZeRO-1", "ids", 6)],
    "engines": [("ZeRO-1", "heads", 2), ("FSDP2", None, 4), ("FSDP2", "replicated", 6)],
    "from without": [("FSDP2", None, 3), ("ZeRO-1", "heads", 5), ("ZeRO-1", "replicated", 6)],
}
LONG_JOURNEYS = {
    "stages": [("ZeRO-2", "heads", 2), ("ZeRO-3", None, 4), ("ZeRO-0", "ids", 6)],
    "stages and back": [("ZeRO-3", "heads", 3), ("ZeRO-0", None, 4), ("ZeRO-3", "ids", 6)],
}


def check_journeys(folder, mesh, journeys=JOURNEYS):
    """From tensor parallelism to data parallelism and back: weights and moments bit for bit."""
    without = init_mesh(read_launch_env(), tp=1)
    for name, hops in journeys.items():
        losses, left, first = [], {}, 0
        for engine, mode, last in hops:
            here = mesh if mode else without
            run = config(folder, MODES[mode or "replicated"], engine, here.tp)
            built = build(run, here)
            if first:
                built.load(folder / f"{name}-{first}")
                assert_equal_states(whole_state(built), left, f"{name}, {engine} {mode}")
            losses += advance(built, run, here, first, last)[0]
            save(built, folder / f"{name}-{last}", here)
            left, first = whole_state(built), last
        expected = bare_loop(config(folder, MODES["heads"], "FSDP2"), WHOLE).losses
        assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE), name


def test_two_tensor_parallel_ranks_train_as_one_process(tmp_path):
    checks = [check_kinds, check_copies, check_skipping, check_in_place, check_journeys]
    run_ranks(partial(on_each_rank, tp=2), 2, str(tmp_path), *checks, timeout=400)


@pytest.mark.heavy
def test_two_in_every_engine_precision_and_variant(tmp_path):
    stages = ("ZeRO-0", "ZeRO-2", "ZeRO-3")
    checks = [
        *(partial(c, engines=stages) for c in (check_kinds, check_copies)),
        *(partial(c, engines=stages) for c in (check_skipping, check_in_place)),
        partial(check_journeys, journeys=LONG_JOURNEYS),
        *(check_variants, check_compiled, check_step_zero, check_bf16),
    ]
    run_ranks(partial(on_each_rank, tp=2), 2, str(tmp_path), *checks, timeout=580)


@pytest.mark.heavy
@pytest.mark.parametrize("tp", [2, 4])
def test_four_ranks_as_two_by_two_and_as_four(tmp_path, tp):
    """Two by two: data-parallel as well, with unequal shares of the rows."""
    checks = [partial(c, engines=tuple(ENGINES)) for c in (check_copies, check_in_place)]
    checks += [partial(check_kinds, engines=tuple(ENGINES)), check_journeys]
    if tp < 4:  # with four tensor-parallel ranks there is one replica, as in check_in_place
        checks.append(check_replicas)
    run_ranks(partial(on_each_rank, tp=tp), 4, str(tmp_path), *checks, timeout=580)
