"""Omitted widths: their derived values, and the errors."""

import re
from pathlib import Path

import pytest
from errors import raises_error

from leviathan.config.embeddings import KINDS
from leviathan.config.load import dump_config, load_config, parse_config
from leviathan.config.run import ModelConfig, ModelFile
from leviathan.estimate.params import count_params

CONFIGS = Path(__file__).parents[3] / "configs"
MATCHED = ["albert", "flat_mlp", "factored_mlp"]


def preset(name: str, kind: str, *changes: str) -> ModelConfig:
    fields = [f"model.embedding.{change}" for change in (f"kind={kind}", *changes)]
    return load_config(CONFIGS / "model" / f"{name}.yaml", fields, ModelFile).model


def test_albert_at_400m_is_nine_wide():
    config = preset("400m", "albert")
    matching = count_params(config).matching
    assert matching is not None
    assert (matching.field, matching.width) == ("width", 9)
    assert matching.parameters == 9 * (200_376 + 1024)
    assert matching.target == 1_729_664
    assert matching.off == matching.parameters - matching.target == 82_936
    assert matching.off_percent == 4.795


@pytest.mark.parametrize("kind", MATCHED)
@pytest.mark.parametrize("name", ["200m", "400m", "1.2b", "v1_60m", "400m_gpt2", "400m_cl100k"])
def test_no_other_width_is_nearer(name, kind):
    config = preset(name, kind)
    lev = preset(name, "leviathan")
    matching = config.embedding.match(config.padded_vocab_size, config.d_model)
    assert matching is not None
    assert matching.target == lev.embedding.parameters(lev.padded_vocab_size, lev.d_model)
    for other in (matching.width - 1, matching.width + 1):
        changed = config.embedding.model_copy(update={matching.field: other})
        size = changed.parameters(config.padded_vocab_size, config.d_model)
        assert abs(size - matching.target) >= abs(matching.off)
    if kind != "albert":
        assert abs(matching.off_percent) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_the_resolved_yaml_states_everything_and_reads_back_equal(kind):
    config = ModelFile(model=preset("400m", kind))
    text = dump_config(config)
    assert "null" not in text
    assert parse_config(text, ModelFile) == config


def test_a_given_width_stays_and_is_told():
    matching = count_params(preset("400m", "albert", "width=64")).matching
    assert matching is not None
    assert matching.width == 64
    assert matching.off == 64 * (200_376 + 1024) - 1_729_664
    hidden = preset("400m", "flat_mlp", "width=8", "hidden=10")
    assert count_params(hidden).input_embedding == 200_376 * 8 + 10 * (8 + 1 + 1024)


def test_another_target():
    matching = count_params(preset("400m", "factored_mlp", "target_params=3000000")).matching
    assert matching is not None
    assert matching.target == 3_000_000
    assert abs(matching.off) <= (128 + 1 + 1024) / 2


@pytest.mark.parametrize(("kind", "field"), [("albert", "width"), ("factored_mlp", "hidden")])
def test_a_target_out_of_reach(kind, field):
    with raises_error("config.invalid", "model.embedding", field, "1,000"):
        preset("400m", kind, "target_params=1000")


def test_the_base_of_a_kind_with_digits_must_reach():
    for kind in ("leviathan", "leviathan_v1", "factored_mlp"):
        with raises_error("config.invalid", "125000", "200376"):
            preset("400m", kind, "base=50")


@pytest.mark.parametrize("kind", KINDS)
def test_part_files_say_the_size_at_400m(tmp_path, kind):
    part = CONFIGS / "embedding" / f"{kind}.yaml"
    whole = tmp_path / "whole.yaml"
    whole.write_text(f"extends: [{CONFIGS}/model/400m.yaml, {part}]\n")
    config = load_config(whole, [], ModelFile).model
    assert config == preset("400m", kind)
    size = re.search(r"At 400M: ([\d,]+) parameters", part.read_text())
    assert size is not None
    assert int(size[1].replace(",", "")) == count_params(config).input_embedding
