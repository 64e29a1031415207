"""6 steps = 3 + 3: in place to the last bit, elsewhere with the same weights, moments and rows."""

import itertools
from pathlib import Path

import pytest
from engine_cases import (
    ENGINES,
    LEVIATHAN,
    ROWS,
    TIED,
    advance,
    assert_equal_states,
    bare_loop,
    build,
    config,
    on_each_rank,
    save,
    whole_state,
    world_of,
)
from engine_checks import BF16, HALF, WHOLE, check_resumes_in_place
from ranks import run_ranks

from leviathan.data.loader import PADDING_SAMPLE, TrainLoader
from leviathan.errors import CheckpointError
from leviathan.parallel.launch_env import free_port

# Losses on another number of ranks, after up to 5 updates: fp32 sums in another order, and Adam's
# division by √v. Seen: 4e-7 relative.
LOSS_TOLERANCE = 5e-6


def check_in_place(folder, mesh):
    """Every engine and stage, fp32 and bf16: resumed equals undisturbed, to the last bit."""
    for name, precision in itertools.product(ENGINES, [{}, BF16]):
        check_resumes_in_place(config(folder, TIED, {**ENGINES[name], **precision}), mesh)
    for engine in (
        *ENGINES,
        {"kind": "fsdp2", "dp_replicate": 2},
        {"kind": "fsdp2", "activation_checkpointing": True},
        *({"zero_stage": stage, "offload_optimizer": True} for stage in (1, 2, 3)),
    ):
        check_resumes_in_place(config(folder, LEVIATHAN, engine), mesh)


def check_anywhere(folder, mesh):
    """What each engine wrote, each engine reads: weights and moments to the last bit."""
    for source in ENGINES:
        run = config(folder, LEVIATHAN, source)
        engine = build(run, mesh)
        advance(engine, run, mesh, 0, HALF)
        save(engine, folder / f"from-{source}", mesh)
        written = whole_state(engine)
        for target in ENGINES:
            other = config(folder, LEVIATHAN, target)
            reader = build(other, mesh)
            reader.load(folder / f"from-{source}")
            assert_equal_states(whole_state(reader), written, f"{source} → {target}")
            advance(reader, other, mesh, HALF, HALF + 1)


def check_a_copy_is_saved(folder, mesh):
    """A save in the background holds the weights of its step, though training goes on."""
    for name in ENGINES:
        run = config(folder, TIED, name)
        engine = build(run, mesh)
        advance(engine, run, mesh, 0, HALF)
        expected = whole_state(engine)
        saved = folder / f"copy-{name}"
        if mesh.rank == 0:
            saved.mkdir()
            (saved / "state.json").write_text('{"optimizer_steps": 3}')
        mesh.any(False)
        handle = engine.save(saved)
        advance(engine, run, mesh, HALF, WHOLE)
        handle.wait()
        mesh.any(False)
        reader = build(run, mesh)
        reader.load(saved)
        assert_equal_states(whole_state(reader), expected, name)


def check_another_model(folder, mesh):
    for name in ("ZeRO-1", "FSDP2"):
        engine = build(config(folder, TIED, name), mesh)
        with pytest.raises(CheckpointError, match="another model"):
            engine.load(folder / "from-ZeRO-1")


def test_two_ranks_go_on_in_place_and_in_any_other_engine(tmp_path):
    checks = [check_in_place, check_anywhere, check_a_copy_is_saved, check_another_model]
    run_ranks(on_each_rank, 2, str(tmp_path), *checks, timeout=500)


# ---------------------------------------------------------------- another number of ranks

# Each hop: ranks, engine, steps up to which it trains. What the last one ends with must be what
# one process ends with.
JOURNEYS = {
    "zero 2-1-2": [(2, "ZeRO-1", 2), (1, "ZeRO-1", 4), (2, "ZeRO-1", 6)],
    "zero-3 2-3": [(2, "ZeRO-3", 3), (3, "ZeRO-3", 6)],
    "zero-2 3-2": [(3, "ZeRO-2", 3), (2, "ZeRO-2", 6)],
    "fsdp2 2-1-2": [(2, "FSDP2", 2), (1, "FSDP2", 4), (2, "FSDP2", 6)],
    "fsdp2 2-3": [(2, "FSDP2", 3), (3, "FSDP2", 6)],
    "fsdp2 3-2": [(3, "FSDP2", 3), (2, "FSDP2", 6)],
    "engines": [(2, "ZeRO-1", 1), (2, "ZeRO-3", 3), (2, "FSDP2", 5), (2, "ZeRO-2", 6)],
    "engines and ranks": [(3, "ZeRO-1", 2), (1, "FSDP2", 4), (2, "ZeRO-3", 6)],
}


def travel(folder, ports):
    """All journeys in one launch of three processes, some of which have nothing to do at times."""
    losses = {name: [] for name in JOURNEYS}
    left = {}
    for hop, ranks in itertools.product(range(max(map(len, JOURNEYS.values()))), (1, 2, 3)):
        with world_of(ranks, ports.pop()) as mesh:
            for name, hops in JOURNEYS.items():
                if mesh is None or hop >= len(hops) or hops[hop][0] != ranks:
                    continue
                _, engine, last = hops[hop]
                first = hops[hop - 1][2] if hop else 0
                run = config(Path(folder), LEVIATHAN, engine)
                built = build(run, mesh)
                if hop:
                    built.load(run.run_dir / f"{name}-{first}")
                    arrived = whole_state(built)
                    if mesh.rank == 0:  # the only one that was there in every hop
                        assert_equal_states(arrived, left[name], f"{name}, hop {hop}")
                losses[name] += advance(built, run, mesh, first, last)[0]
                save(built, run.run_dir / f"{name}-{last}", mesh)
                left[name] = whole_state(built)
    return losses


def test_other_numbers_of_ranks_and_engines_go_on_with_the_same_state(tmp_path):
    expected = bare_loop(config(tmp_path, LEVIATHAN, "FSDP2"), WHOLE).losses
    ports = [free_port() for _ in range(12)]
    losses = run_ranks(travel, 3, str(tmp_path), ports, timeout=400)[0]
    for name, found in losses.items():
        assert found == pytest.approx(expected, rel=LOSS_TOLERANCE), name


# ---------------------------------------------------------------- rows


def test_rows_seen_are_those_of_the_undisturbed_run_across_an_epoch(tiny_dataset):
    """Ranks 2 → 3 → 1 → 2, with an epoch's end on the way: no row twice, none missing."""

    def stream(micro):
        return TrainLoader(tiny_dataset, 7, 100, ROWS, micro)

    rows = stream(2).info.split("train").rows
    around = rows // ROWS  # the step in which the first epoch ends
    leg = around // 3
    here = stream(2)
    expected = [stream(2).sample_numbers(step).tolist() for step in range(around + 4)]
    seen = []
    for step in range(around + 4):
        ranks, micro = [(2, 2), (3, 1), (1, 4), (2, 3)][min(3, step // leg)]
        if step % leg == 0:
            here = stream(micro)  # as in a fresh process
        of_ranks = [
            [row for batch in here.microbatches(step, rank, ranks) for row in batch.rows]
            for rank in range(ranks)
        ]
        seen.append([row for mine in of_ranks for row in mine if row != PADDING_SAMPLE])
    assert seen == expected
    flat = [row for batch in seen for row in batch]
    assert sorted(flat[:rows]) == list(range(rows))
    assert len(set(flat[rows:])) == len(flat[rows:])
