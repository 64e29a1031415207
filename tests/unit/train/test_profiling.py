"""Profiles of real steps: what is written, and to which module time is put."""

import csv
import json

import pytest
from errors import raises_error

from leviathan.train.profiler import ProfileConfig, parse_profile


@pytest.mark.parametrize(
    "engine",
    [{"kind": "fsdp2"}, {"kind": "deepspeed", "zero_stage": 1, "activation_checkpointing": True}],
)
def test_steps_are_profiled_and_training_is_as_without(run_config, trained, capfd, engine):
    plain = trained(run_config("plain", engine=engine))
    config = run_config("profiled", engine=engine)
    log = trained(config, profile=ProfileConfig(3, 4, memory=True))
    assert [line.get("loss") for line in log] == [line.get("loss") for line in plain]

    # Both steps of the line at step 4 were profiled: it has no speed, and no shares of their time.
    speeds = {line["step"]: line["tokens_per_s"] for line in log if "loss" in line}
    assert speeds.pop(4) is None
    assert all(speed > 0 for speed in speeds.values())
    (line,) = (line for line in log if line["step"] == 4 and "loss" in line)
    assert line["profiled_steps"] == 2
    assert "embedding_share" not in line

    folder = config.run_dir / "profile" / "steps-3-4"
    names = {
        event.get("name")
        for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    }
    assert {"aten::mm", "module: lm_head", "module: model.layers.1.mlp"} <= names

    with (folder / "operators.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-3)
    calls = {(r["module"], r["phase"], r["operator"]): int(r["calls"]) for r in rows}
    # Two steps of two micro-batches through two layers; each product has two in its backward pass.
    place = "model.layers.*.mlp.up_proj"
    assert calls[place, "forward", "aten::mm"] == 8
    recomputed = 8 if engine.get("activation_checkpointing") else 0
    assert calls[place, "backward", "aten::mm"] == 16 + recomputed
    # The head's gradient is formed in its forward pass: three products.
    head = sum(
        n
        for (module, phase, op), n in calls.items()
        if module == "lm_head" and op in ("aten::mm", "aten::addmm") and phase == "forward"
    )
    assert head == 12
    assert ("optimizer", "update", "aten::_fused_adamw_") in calls
    other = sum(float(row["share"]) for row in rows if row["module"] == "other")
    assert other < 0.7

    text = (folder / "operators.txt").read_text()
    assert text.startswith("matrix products: ")
    assert "model.layers.*.mlp.up_proj" in text
    with (folder / "memory.csv").open() as file:
        memory = list(csv.DictReader(file))
    held = [int(row["held_bytes"]) for row in memory]
    assert held[0] == int(memory[0]["bytes"])
    assert max(held) > 601 * 16 * 4  # at the least the gradient of the table
    assert "matrix products" in capfd.readouterr().err


def test_a_run_that_ends_early_leaves_what_there_is(run_config, trained):
    config = run_config(steps=8)
    trained(config, profile=ProfileConfig(8, 20))
    assert (config.run_dir / "profile/steps-8-20/operators.csv").exists()


def test_what_can_be_asked_for():
    assert parse_profile(None, False, 10) is None
    assert parse_profile("steps=3", False, 10) == ProfileConfig(3, 3)
    assert parse_profile("steps=3-5", True, 10) == ProfileConfig(3, 5, True)
    for text in ("3-5", "steps=a", "steps=5-3", "steps=0-1", "steps=3-11"):
        with raises_error("cli.invalid_option", "--profile", text):
            parse_profile(text, False, 10)
    with raises_error("cli.conflicting_options", "--memory-snapshot", "--profile"):
        parse_profile(None, True, 10)
