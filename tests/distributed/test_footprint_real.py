"""The memory model compared with the real memory of the engines on two ranks."""

from engine_cases import ENGINES, LEVIATHAN, advance, build, config, on_each_rank
from ranks import run_ranks

from leviathan.estimate.layout import parallel_layout
from leviathan.estimate.memory import memory

# Padding to equal parts: the engines pad to whole rows or a few elements a parameter. These
# models are tiny (7,000 parameters), so that it shows.
PADDING = 0.02


def held(engine, name):
    """Bytes of weights and of AdamW's moments that an engine has on this rank."""
    moments = sum(
        value.numel() * value.element_size()
        for state in engine._adamw.state.values()
        for key, value in state.items()
        if key in ("exp_avg", "exp_avg_sq")
    )
    if name == "FSDP2":
        return sum(p.numel() * p.element_size() for p in engine._masters.values()), moments
    wrapped, stage = engine._wrapped, int(name[-1])
    low = [getattr(p, "ds_tensor", p) for p in engine._ds.module.parameters()]
    copies = {
        0: lambda: [],
        1: lambda: wrapped.single_partition_of_fp32_groups,
        2: lambda: wrapped.single_partition_of_fp32_groups,
        3: lambda: wrapped.fp32_partitioned_groups_flat,
    }[stage]()
    return sum(p.numel() * p.element_size() for p in [*low, *copies]), moments


def compare(folder, mesh):
    found = {}
    for name in ENGINES:
        run = config(folder, LEVIATHAN, name)
        engine = build(run, mesh)
        advance(engine, run, mesh, 0, 1)
        expected = memory(run.model, parallel_layout(run, mesh.world_size))
        found[name] = (held(engine, name), (expected.weights, expected.moments))
    return found


def test_weights_and_moments_are_as_counted(tmp_path):
    for (found,) in run_ranks(on_each_rank, 2, str(tmp_path), compare):
        assert found.keys() == ENGINES.keys()
        for name, (real, counted) in found.items():
            for part, have, want in zip(("weights", "moments"), real, counted, strict=True):
                assert abs(have - want) <= PADDING * want, (name, part, have, want)
