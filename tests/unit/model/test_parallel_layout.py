"""Memory of a rank against numbers worked out by hand."""

from pathlib import Path

import pytest
from errors import raises_error

from leviathan.config.embeddings import KINDS
from leviathan.config.load import load_config
from leviathan.config.run import ModelConfig, ModelFile, RunConfig
from leviathan.estimate.layout import ParallelLayout, parallel_layout, sizes
from leviathan.estimate.memory import memory
from leviathan.estimate.params import count_params
from leviathan.model.tp_layout import Shard
from leviathan.model.transformer import meta_model

CONFIGS = Path(__file__).parents[3] / "configs"
# A block: 4 · 8² of attention, 3 · 8 · 32 of the MLP, two norms of 8: 1,040. Tables: 64 · 8 = 512.
BLOCK, TABLE, NORM = 256 + 768 + 16, 512, 8


def model(embedding="untied", **changes):
    return ModelConfig.model_validate(
        {"d_model": 8, "n_layers": 3, "n_heads": 2, "seq_len": 16, "vocab_size": 60}
        | {"padded_vocab_size": 64, "embedding": {"kind": embedding}}
        | changes
    )


def test_sizes_by_hand():
    whole = sizes(model(), 1)
    assert (whole.block, whole.blocks) == (BLOCK, 3 * BLOCK)
    assert (whole.embedding, whole.rest) == (TABLE, TABLE + NORM)
    half = sizes(model(), 2)  # matrices and tables are cut, norms are not
    assert (half.block, half.embedding, half.rest) == (512 + 16, TABLE // 2, TABLE // 2 + NORM)
    assert half.replicated == 3 * 16 + NORM
    tied = sizes(model("tied"), 1)
    assert (tied.embedding, tied.rest) == (0, TABLE + NORM)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_the_models(kind):
    config = load_config(
        CONFIGS / "model/200m.yaml", [f"model.embedding.kind={kind}"], ModelFile
    ).model
    assert sizes(config, 1).total == count_params(config).total
    half = sizes(config, 2)
    assert 2 * (half.total - half.replicated) + half.replicated == count_params(config).total


@pytest.mark.parametrize(
    "embedding",
    [*({"kind": kind} for kind in KINDS)]
    + [{"kind": "leviathan", "tp_mode": mode} for mode in ("replicated", "heads")],
    ids=str,
)
def test_replicated_parameters_are_those_of_the_modules(embedding):
    config = load_config(CONFIGS / "model/200m.yaml", [], ModelFile).model
    config = ModelConfig.model_validate(config.model_dump() | {"embedding": embedding})
    built = meta_model(config)
    sharded = {
        f"{path}.{name}"
        for path, module in built.named_modules()
        for name, how in getattr(module, "tp_layout", dict)().items()
        if isinstance(how, Shard)
    }
    parameters = dict(built.named_parameters())
    replicated = sum(p.numel() for name, p in parameters.items() if name not in sharded)
    assert sizes(config, 2).replicated == replicated


def test_a_tp_that_divides_nothing_is_an_error():
    with raises_error("parallel.indivisible", "parallel.tp=3"):
        sizes(model(), 3)


N = 3 * BLOCK + 2 * TABLE + NORM  # 4,152 parameters

ENGINES = {
    # (layout): weights and moments, in bytes
    "ZeRO-0, fp32": (ParallelLayout(4, zero_stage=0, bf16=False), 4 * N, 8 * N),
    "ZeRO-0, bf16": (ParallelLayout(4, zero_stage=0), 6 * N, 8 * N),
    "ZeRO-1": (ParallelLayout(4, zero_stage=1), 3 * N, 2 * N),
    "ZeRO-2": (ParallelLayout(4, zero_stage=2), 3 * N, 2 * N),
    "ZeRO-3": (ParallelLayout(4, zero_stage=3), 3 * N // 2, 2 * N),
    "FSDP2": (ParallelLayout(4, engine="fsdp2"), N, 2 * N),
    "HSDP": (ParallelLayout(4, engine="fsdp2", dp_replicate=2), 2 * N, 4 * N),
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_each_engine_holds(name):
    layout, *expected = ENGINES[name]
    held = memory(model(), layout)
    assert [held.weights, held.moments] == expected
    assert held.total == sum(held.by_part.values())
    assert "moment" not in held.by_part


def test_gradients_and_what_is_on_the_way_by_hand():
    rest = TABLE + NORM

    def at_the_head(kind, **changes):
        held = memory(model(), ParallelLayout(4, engine=kind, micro_batch_size=5, **changes))
        assert held.moment == "at the head"
        return held.gradients, held.communication

    # bf16. FSDP2: fp32 shards; the head's group, a block, and in fp32 what was reduced last.
    assert at_the_head("fsdp2") == (N, 2 * rest + 2 * BLOCK + 4 * TABLE)
    assert at_the_head("fsdp2", accumulates=False) == (0, 2 * rest + 2 * BLOCK)
    # ZeRO-1: fp32 sums of all, and the bucket of bf16 gradients until they are reduced.
    assert at_the_head("deepspeed") == (4 * N, 2 * N)
    assert at_the_head("deepspeed", bucket=100) == (4 * N, 2 * 100)
    assert at_the_head("deepspeed", accumulates=False) == (4 * N, 0)
    assert at_the_head("deepspeed", zero_stage=2) == (4 * N // 4, 0)


def test_activations_by_hand():
    # fp32. A token in a block: four of width 8 around the norms; in what tp cuts 2 · 8 + 2 · 8 +
    # 4 · 32 and a sum for each of two heads. After the blocks two of width 8.
    tokens, norms, cut = 5 * 16, 4 * 32, 4 * (160 + 2)
    layout = ParallelLayout(2, micro_batch_size=5, bf16=False)
    assert memory(model(), layout).activations == tokens * (3 * (norms + cut) + 4 * 16)
    half = ParallelLayout(2, tp=2, micro_batch_size=5, bf16=False)
    assert memory(model(), half).activations == tokens * (3 * (norms + cut // 2) + 4 * 16)
    again = memory(model(), ParallelLayout(2, micro_batch_size=5, bf16=False, recompute=True))
    assert again.moment == "while a block is recomputed"
    kept = 4 * (3 * 8 + 16)  # and of the block at work all, with two gradients of width 32
    assert again.activations == tokens * (kept + norms - 4 * 8 + cut + 4 * 2 * 32)
    cpu = ParallelLayout(
        2, micro_batch_size=5, device="cpu"
    )  # bf16; what norms save is in fp32, and twice
    block = 2 * (2 * 4 * 8 + 2 * 8) + 2 * 160 + 4 * 2
    assert memory(model(), cpu).activations == tokens * (3 * block + 2 * 4 * 8 + 2 * 8)


def test_logits_by_hand():
    # 80 tokens × 64 logits, the head's gradient, and twice that of the hidden states; all fp32.
    layout = ParallelLayout(2, micro_batch_size=5, bf16=False)
    assert memory(model(), layout).logits == 4 * (80 * 64 + 64 * 8 + 2 * 80 * 8)
    # bf16: logits also in fp32 and their slope in bf16.
    low = ParallelLayout(2, micro_batch_size=5)
    assert memory(model(), low).logits == 8 * 80 * 64 + 4 * 64 * 8 + 2 * 80 * 8


def test_a_run_s_layout():
    changes = ["engine.kind=fsdp2", "engine.dp_replicate=2", "engine.precision=bf16"]
    run = load_config(CONFIGS / "run/quickstart.yaml", changes, RunConfig)
    layout = parallel_layout(run, 8)
    assert layout == ParallelLayout(8, 1, "fsdp2", 0, 2, micro_batch_size=2, accumulates=False)
    assert (layout.dp, layout.shards, layout.name) == (8, 4, "HSDP, 2 replicas")
    with raises_error("parallel.indivisible", "dp_replicate=2"):
        parallel_layout(run, 7)
