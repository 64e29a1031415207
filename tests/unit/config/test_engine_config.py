"""The kinds of engines, and deepspeed where none is named."""

import pytest
from errors import raises_error
from pydantic import TypeAdapter

from leviathan.config.load import load_config
from leviathan.config.run import DeepSpeedConfig, EngineChoice, Fsdp2Config, RunConfig

RUN = """
run_dir: run
data: {path: data}
model: {d_model: 8, n_layers: 1, n_heads: 2, vocab_size: 20, embedding: {kind: tied}}
train: {steps: 9, global_batch_size: 2, micro_batch_size: 1}
engine: {precision: bf16}
"""


def load(tmp_path, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return load_config(path, overrides, RunConfig).engine


def test_deepspeed_is_what_is_not_named(tmp_path):
    assert load(tmp_path) == DeepSpeedConfig(precision="bf16")
    assert load(tmp_path, "engine.zero_stage=3") == DeepSpeedConfig(precision="bf16", zero_stage=3)


def test_another_kind_keeps_what_both_have(tmp_path):
    assert load(tmp_path, "engine.kind=fsdp2") == Fsdp2Config(precision="bf16")
    assert load(tmp_path, "engine.kind=fsdp2", "engine.dp_replicate=2").dp_replicate == 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["engine.zero_stag=1"],
            ("config.invalid", "engine.zero_stage"),
        ),
        (["engine.zero_stage=5"], ("config.invalid", "engine.zero_stage")),
        (["engine.kind=fsdp"], ("config.invalid", "engine.kind", "fsdp2")),
        (["engine.kind=fsdp2", "engine.zero_stage=1"], ("config.invalid", "engine.zero_stage")),
        (
            ["engine.kind=fsdp2", "engine.dp_replicate=0"],
            ("config.invalid", "engine.dp_replicate"),
        ),
        (
            ["engine.zero_stage=0", "engine.offload_optimizer=true"],
            ("config.invalid", "offload_optimizer"),
        ),
        (["engine=3"], ("config.invalid",)),
    ],
)
def test_what_is_wrong_is_named_without_the_kind(tmp_path, overrides, expected):
    with raises_error(*expected):
        load(tmp_path, *overrides)


def test_a_resolved_engine_reads_back():
    adapter = TypeAdapter(EngineChoice)
    for engine in (DeepSpeedConfig(zero_stage=2), Fsdp2Config(dp_replicate=2)):
        assert adapter.validate_python(adapter.dump_python(engine)) == engine
