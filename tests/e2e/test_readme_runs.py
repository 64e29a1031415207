"""The commands of README.md and docs/experiments.md, on small configurations."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from documentation import ROOT, programs, run, runnable

from leviathan.config.load import read_config

# Nothing is trained or read: they go as they are, in the repository's own configurations.
ON_PAPER = ("leviathan experiment plan ", "leviathan experiment run ", "leviathan params ")
SMALL = ["d_model=16", "n_layers=1", "n_heads=2", "seq_len=32", "vocab_size=601", "d_ff=32"]
SMALL += ["padded_vocab_size=608", "embedding.d_seed=8", "embedding.heads=2", "embedding.rank=4"]
SHORT = ["steps=4", "global_batch_size=8", "micro_batch_size=4", "eval_every=2", "log_every=1"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs(tmp_path)
    return tmp_path


def on_paper(page: str) -> list[str]:
    return [line for line in runnable(page) if line.startswith(ON_PAPER)]


def test_commands_that_plan(place: Path) -> None:
    lines = on_paper("README.md") + runnable("docs/experiments.md")
    assert len(lines) == 6
    for line in lines:
        run(line, place)
    assert len(json.loads((place / "jobs/plan.json").read_text())["runs"]) == 6


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_commands_that_work(place: Path, tiny_corpus: Path, tiny_tokenizer: Path) -> None:
    (place / "configs").unlink()
    shutil.copytree(ROOT / "configs", place / "configs")
    shutil.copytree(tiny_corpus, place / "corpus")
    for file in (place / "corpus").iterdir():
        file.rename(file.with_suffix(".jsonl.zst"))  # determined by its bytes
    pile = place / "configs/data/pile.yaml"
    prep, _ = read_config(pile, [f"tokenizer={tiny_tokenizer}", "seq_len=32"])
    pile.write_text(yaml.safe_dump(prep | {"validation": {"fraction": 0.1}}))
    path = place / "configs/run/pile_400m.yaml"
    changes = [f"model.{c}" for c in SMALL] + [f"train.{c}" for c in SHORT]
    changes += ["optim.warmup_steps=1", "engine.precision=fp32"]
    training, _ = read_config(path, changes)
    path.write_text(yaml.safe_dump(training))

    lines = [line for line in runnable("README.md") if line not in on_paper("README.md")]
    assert len(lines) >= 12
    for line in lines:
        run(line.replace("workers=8", "workers=1"), place)
    assert (place / "report/report.html").is_file()
    assert (place / "exported/model.safetensors").is_file()
