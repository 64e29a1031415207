"""Experiments as lists of runs: comparisons, errors reported together, and costs."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from errors import raises_error

from leviathan.config.identity import flatten
from leviathan.config.load import load_config
from leviathan.config.run import RunConfig
from leviathan.errors import ConfigError
from leviathan.estimate.layout import parallel_layout
from leviathan.estimate.memory import memory
from leviathan.experiments.emit import emit_experiment
from leviathan.experiments.expand import load_experiment
from leviathan.experiments.plan import plan_experiment, plan_table

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "configs" / "experiments"
SMALL = ROOT / "configs" / "run" / "small.yaml"


@pytest.fixture
def write(tmp_path: Path):
    """Writes an experiment on the small run; the given fields replace or extend it."""

    def write(**fields) -> Path:
        experiment = {
            "title": "T",
            "question": "Q?",
            "out": str(tmp_path / "out"),
            "run": str(SMALL),
            "baseline": "tied",
            "arms": {"tied": {"model.embedding.kind": "tied"}, "leviathan": None},
        }
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(experiment | fields, sort_keys=False))
        return path

    return write


def test_every_experiment_and_its_small_twin_load():
    files = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))
    whole = [name for name in files if not name.endswith("_small")]
    assert whole
    assert {f"{name}_small" for name in whole} == set(files) - set(whole)
    for name in files:
        experiment = load_experiment(EXPERIMENTS / f"{name}.yaml")
        assert sum(run.baseline for run in experiment.runs) >= 1
        assert len({run.name for run in experiment.runs}) == len(experiment.runs)


def test_published_sizes():
    sizes = {
        "scales": [
            206_899_840, 208_432_896, 406_537_216, 408_266_880, 1_215_727_616, 1_217_981_568,
        ],
        "v1": [57_591_040, 59_891_456, 108_887_296, 108_149_504, 421_042_944, 420_801_792],
    }  # fmt: skip
    for name, expected in sizes.items():
        plan = plan_experiment(load_experiment(EXPERIMENTS / f"{name}.yaml"))
        assert [run["parameters"]["total"] for run in plan["runs"]] == expected
    steps = [run.config.train.steps for run in load_experiment(EXPERIMENTS / "scales.yaml").runs]
    assert steps == [16_000, 16_000, 32_000, 32_000, 92_000, 92_000]


def test_arms_differ_in_their_embedding_alone(write):
    tied, leviathan = load_experiment(write()).runs
    assert tied.baseline
    assert not leviathan.baseline
    here, there = (flatten(run.config.model_dump(mode="json")) for run in (tied, leviathan))
    differing = {key for key in here | there if here.get(key) != there.get(key)}
    assert {key for key in differing if not key.startswith("model.embedding.")} == {"run_dir"}


def test_order_names_and_layers(write):
    path = write(
        seeds=[1, 2],
        sweep={"optim.lr": [1e-3, 2e-3]},
        set={"train.steps": 30, "optim": {"warmup_steps": 3}},
        groups={"small": {"set": {"model.d_model": 32}}, "large": {"set": {"train.steps": 40}}},
    )
    experiment = load_experiment(path)
    assert [run.name for run in experiment.runs][:5] == [
        "small/tied-lr0.001-s1",
        "small/leviathan-lr0.001-s1",
        "small/tied-lr0.001-s2",
        "small/leviathan-lr0.001-s2",
        "small/tied-lr0.002-s1",
    ]
    assert len(experiment.runs) == 16
    small, large = experiment.runs[0].config, experiment.runs[-1].config
    assert (small.model.d_model, small.train.steps, small.optim.warmup_steps) == (32, 30, 3)
    assert (large.model.d_model, large.train.steps, large.optim.lr) == (64, 40, 2e-3)
    assert small.run_dir == experiment.config.out / experiment.runs[0].name


def test_changes_from_the_command_line(write):
    experiment = load_experiment(
        write(), ["seeds=[7,8]", "set.train.steps=25", "sweep.optim.lr=[1e-3,3e-3]"]
    )
    assert [(run.seed, run.config.train.steps) for run in experiment.runs[:4]] == [(7, 25)] * 2 + [
        (8, 25)
    ] * 2
    assert {run.config.optim.lr for run in experiment.runs} == {1e-3, 3e-3}


def test_a_budget_in_tokens_per_parameter_is_the_baselines(write):
    runs = load_experiment(write(tokens_per_parameter=3)).runs
    plan = plan_experiment(load_experiment(write(tokens_per_parameter=3)))
    assert runs[0].config.train.steps == runs[1].config.train.steps
    assert plan["runs"][0]["tokens_per_parameter"] == pytest.approx(3, rel=0.01)
    assert plan["runs"][1]["tokens_per_parameter"] < 3


def test_small_text_sets_what_follows_from_it(write):
    text = {"folder": "texts", "vocab_size": 1000, "seq_len": 64}
    path = write(tiny_corpus=text, groups={"1k": {}, "2k": {"vocab_size": 2000}})
    first, *_, last = load_experiment(path).runs
    assert str(first.config.data.path) == "texts/v1000-t64"
    assert (first.config.model.vocab_size, first.config.model.padded_vocab_size) == (1001, 1024)
    assert str(last.config.data.path) == "texts/v2000-t64"
    assert last.config.model.seq_len == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"armz": {}}, ("config.invalid",)),
        ({"baseline": "untied"}, ("config.invalid", "untied")),
        ({"arms": {}}, ("config.invalid",)),
        ({"seeds": [1, 1]}, ("config.invalid",)),
        ({"seeds": []}, ("config.invalid",)),
        ({"set": {"seed": 3}}, ("config.invalid",)),
        ({"groups": {"a": {"rum": "x"}}}, ("config.invalid", "groups.a.rum")),
        ({"run": "nowhere.yaml"}, ("experiment.invalid", "nowhere.yaml")),
        ({"machine": {"mfu": 1.4}}, ("config.invalid", "machine.mfu", "1.4")),
        ({"sweep": {"optim.lr": []}}, ("config.invalid",)),
    ],
)
def test_mistakes(write, fields, message):
    with raises_error(*message):
        load_experiment(write(**fields))


def test_mistakes_in_runs_are_told_together_with_their_lines(write):
    arms = {
        "tied": {"model.embedding.kind": "tied"},
        "a": {"model.embedding.kind": "leviathn"},
        "b": {"model.d_mdel": 3},
    }
    path = write(arms=arms, seeds=[1, 2, 3])
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2  # each once, not for every seed
    assert "did you mean leviathan?" in lines[0]
    assert "did you mean model.d_model?" in lines[1]
    text = path.read_text().splitlines()
    for line, key in zip(lines, ("leviathn", "d_mdel"), strict=True):
        number = int(re.search(r"experiment\.yaml:(\d+):", line).group(1))  # type: ignore[union-attr]
        assert key in text[number - 1]


def test_plan_adds_up(write):
    experiment = load_experiment(write(machine={"peak_tflops": 100, "mfu": 0.5, "devices": 4}))
    plan = plan_experiment(experiment)
    run = plan["runs"][0]
    assert run["tokens"] == 100 * 32 * 128
    assert run["flops"] == run["tokens"] * run["flops_per_token"]
    assert run["device_hours"] == pytest.approx(run["flops"] / 50e12 / 3600)
    assert run["state_bytes"] == 16 * run["parameters"]["total"]
    config = experiment.runs[0].config
    assert run["device_bytes"] == memory(config.model, parallel_layout(config, 4)).total
    assert plan["total"]["runs"] == plan["left"]["runs"] == 2
    assert plan["total"]["flops"] == sum(one["flops"] for one in plan["runs"])
    json.dumps(plan)
    text = plan_table(plan)
    assert "at 50 % of 100 TFLOP/s" in text
    assert "leviathan-s1234" in text


def test_emit_writes_a_launch_a_run(write, tmp_path):
    experiment = load_experiment(write(launch="torchrun --nproc-per-node 4", seeds=[1, 2]))
    written = emit_experiment(experiment, tmp_path / "jobs")
    scripts = (tmp_path / "jobs" / "runs.txt").read_text().split()
    assert scripts == written["files"]["scripts"]
    assert len(scripts) == 4
    for script, run in zip(scripts, experiment.runs, strict=True):
        path = tmp_path / "jobs" / script
        config = load_config(path.with_suffix(".yaml"), [], RunConfig)
        assert config == run.config
        text = path.read_text()
        assert "exec torchrun --nproc-per-node 4" in text
        assert str(path.with_suffix(".yaml")) in text
        subprocess.run(["bash", "-n", str(path)], check=True)
    array = tmp_path / "jobs" / "array.sbatch"
    assert "#SBATCH --array=1-4" in array.read_text()
    subprocess.run(["bash", "-n", str(array)], check=True)


def test_emitted_scripts_take_every_name_as_it_is(write, tmp_path):
    """Titles, arms and directories with shell syntax are not executed."""
    place = tmp_path / "$(touch harm) `touch harm`; touch harm & 'x' \"y\""
    arms = {"tied": {"model.embedding.kind": "tied"}, "a\ntouch harm\n$(touch harm)": None}
    path = write(launch="launcher --n 2", arms=arms, title="T\ntouch harm", out=str(place / "out"))
    path = path.rename(tmp_path / "s tudy$(touch harm).yaml")
    experiment = load_experiment(path)
    emit_experiment(experiment, place / "jobs")
    launcher = tmp_path / "bin" / "launcher"
    launcher.parent.mkdir()
    launcher.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > '{tmp_path}/called'\n")
    launcher.chmod(0o755)
    for number, run in enumerate(experiment.runs, start=1):
        subprocess.run(
            ["bash", str(place / "jobs" / "array.sbatch")],
            env={"PATH": f"{launcher.parent}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(number)},
            cwd=tmp_path,
            check=True,
        )
        *_, config = (tmp_path / "called").read_text().splitlines()
        assert Path(config).is_relative_to(place)
        assert load_config(Path(config), [], RunConfig) == run.config
        (tmp_path / "called").unlink()
    assert not list(tmp_path.rglob("harm"))
