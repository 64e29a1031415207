"""Every shipped YAML file loads and has the documented content."""

from pathlib import Path

import pytest

from leviathan.config.data import PrepConfig
from leviathan.config.load import load_config
from leviathan.config.run import ModelFile, RunConfig

ROOT = Path(__file__).parents[3]
SCHEMAS = {"model": ModelFile, "run": RunConfig, "data": PrepConfig}
PARTS = {"embedding", "vocabulary"}  # bases of other files
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
FILES = [path for path in FILES if path.parent.name != "experiments"]  # tests/unit/experiments


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_loads(path, tmp_path):
    if path.parent.name in PARTS:
        whole = tmp_path / "whole.yaml"
        whole.write_text(f"extends: [{ROOT}/configs/model/400m.yaml, {path}]\n")
        path, schema = whole, ModelFile
    else:
        schema = SCHEMAS[path.parent.name]
    load_config(path, [], schema)


@pytest.mark.parametrize(("scale", "tokens"), [("200m", 4.2e9), ("400m", 8.4e9), ("1.2b", 24.1e9)])
def test_presets_have_the_papers_budget(scale, tokens):
    config = load_config(ROOT / "configs" / "run" / f"pile_{scale}.yaml", [], RunConfig)
    step = config.train.global_batch_size * config.model.seq_len
    assert step == 262_144
    assert config.train.steps * step == pytest.approx(tokens, rel=0.01)
    assert config.optim.weight_decay == 0
