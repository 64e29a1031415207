"""Suggestions for unknown keys: synonyms of other stacks first, then the nearest spelling."""

import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.config.explain import SYNONYMS, _all_keys, did_you_mean, nearest
from leviathan.config.load import parse_config
from leviathan.config.run import ModelFile, RunConfig

KNOWN = {".".join(k) for schema in (RunConfig, PrepConfig, ModelFile) for k in _all_keys(schema)}


def test_synonyms_lead_to_existing_keys() -> None:
    targets = {ours for ours in SYNONYMS.values() if " " not in ours}
    assert targets <= KNOWN
    assert not SYNONYMS.keys() & {key for key in KNOWN if "." not in key}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model: {hidden_size: 8}", "model.d_model"),
        ("model: {hidden-size: 8}", "model.d_model"),
        ("gradient_accumulation_steps: 2", "train.micro_batch_size"),
        ("resume: true", "run the same command again"),
        ("train: {epochs: 2}", "train.steps"),
        ("model: {n_layrs: 2}", "did you mean model.n_layers?"),
        ("train: {run_dir: x}", "did you mean run_dir?"),
        ("train: {zzz: x}", "expected one of steps"),
    ],
)
def test_unknown_keys_name_ours(key: str, expected: str) -> None:
    with raises_error("config.invalid", expected):
        parse_config(key, RunConfig)


def test_nearest_ignores_case() -> None:
    assert nearest("wikipedia", ["Wikipedia (en)", "Wikipedia"]) == "Wikipedia"
    assert nearest("resume", ["remote"], cutoff=0.7) is None
    assert did_you_mean("xyz", ["abc"], otherwise="expected abc") == "expected abc"
