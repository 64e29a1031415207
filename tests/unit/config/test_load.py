"""The strict configuration: all errors at once, each with location and expected value."""

from pathlib import Path

import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.config.embeddings.leviathan import LeviathanConfig
from leviathan.config.embeddings.tied import TiedConfig
from leviathan.config.load import dump_config, load_config, parse_config
from leviathan.config.run import RunConfig
from leviathan.errors import ConfigError

GOOD = """\
run_dir: runs/x
data: {path: some/data}
model:
  d_model: 64
  n_layers: 2
  n_heads: 4
  vocab_size: 300
  embedding: {kind: leviathan, d_seed: 8, knots: 5}
train: {steps: 10, global_batch_size: 4, micro_batch_size: 2}
optim: {lr: 1e-3}
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, RunConfig)
    return str(caught.value).splitlines()


def test_defaults_follow_from_other_fields(write):
    config = load_config(write(GOOD), [], RunConfig)
    assert (config.model.d_ff, config.model.n_kv_heads) == (256, 4)
    assert config.model.padded_vocab_size == 300
    assert config.optim.lr == 0.001  # plain YAML 1.1 would read 1e-3 as a string


def test_resolved_yaml_round_trips(write):
    config = load_config(write(GOOD), [], RunConfig)
    assert parse_config(dump_config(config), RunConfig) == config


def test_every_problem_is_reported_with_line_and_spelling(write):
    text = GOOD.replace("n_layers", "n_layer").replace("knots: 5", "knot: 5")
    found = problems(write(text), "optim.schedule=cosin", "trian.steps=3", "steps=7")
    joined = "\n".join(found)
    assert "run.yaml:5: model.n_layer: unknown key; use model.n_layers" in joined
    assert "model.embedding.knot: unknown key; did you mean model.embedding.knots?" in joined
    assert "command line: optim.schedule: found 'cosin'" in joined
    assert "did you mean cosine?" in joined
    assert "command line: trian: unknown key; did you mean train?" in joined
    assert "command line: steps: unknown key; did you mean train.steps?" in joined
    assert "run.yaml:3: model.n_layers: missing" in joined


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=ten", "found 'ten', expected a valid integer"),
        ("train.steps=0", "greater than 0"),
        ("run_dir=''", "run_dir: found '', expected a path"),
        ("optim.lr=.inf", "optim.lr: found inf"),
        ("optim.betas=[0.9, 2]", "less than 1"),
        ("train=3", "expected a section"),
        ("train.steps.more=3", "is a value (10), not a section"),
        ("model.embedding.kind=leviatan", "did you mean leviathan?"),
        ("model.n_heads=5", "n_heads (5) must divide d_model (64)"),
        ("model.embedding.base=3", "vocabulary of 300 ids"),
        ("train.micro_batch_size=8", "greater than global_batch_size (4)"),
        ("optim.warmup_steps=10", "must be less than train.steps"),
        ("parallel.tp=0", "parallel.tp: found 0"),
        ("engine.zero_stage=4", "expected 0, 1, 2 or 3"),
        ("train.steps", "expected key.sub_key=value"),
    ],
)
def test_bad_override(write, override, expected):
    assert expected in "\n".join(problems(write(GOOD), override))


def test_another_kind_drops_the_former_kinds_fields(write):
    config = load_config(write(GOOD), ["model.embedding.kind=tied"], RunConfig)
    assert config.model.embedding == TiedConfig()
    again = load_config(write(GOOD), ["model.embedding.kind=leviathan"], RunConfig)
    assert isinstance(again.model.embedding, LeviathanConfig)
    assert again.model.embedding.d_seed == 8


def test_extends_merges_deeply_and_is_relative_to_its_file(write, tmp_path):
    (tmp_path / "base").mkdir()
    write(GOOD, "base/run.yaml")
    child = write("extends: base/run.yaml\ntrain: {steps: 20}\n", "child.yaml")
    config = load_config(child, [], RunConfig)
    assert (config.train.steps, config.train.global_batch_size) == (20, 4)


def test_extends_in_a_circle_or_to_nowhere(write):
    write("extends: b.yaml\n", "a.yaml")
    circle = write("extends: a.yaml\n", "b.yaml")
    assert "cycle" in problems(circle)[0]
    assert "none.yaml" in problems(write("extends: none.yaml\n", "c.yaml"))[0]


@pytest.mark.parametrize("text", ["a: [1", "a: 1\na: 2\n", "- 1\n- 2\n", "just words"])
def test_broken_yaml_is_one_line(write, text):
    (line,) = problems(write(text))
    assert "run.yaml" in line


def test_missing_file():
    with raises_error("config.not_found", "nowhere/run.yaml"):
        load_config(Path("nowhere/run.yaml"), [], RunConfig)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run_dir: a\nseed: !!int abc\n", "run.yaml:2: not valid YAML: 'abc' is not a valid int"),
        ("a: !!bool maybe\n", "run.yaml:1: not valid YAML: 'maybe' is not a valid bool"),
        ("a: !!timestamp b\n", "is not a valid timestamp"),
        ('a: !!int ""\n', "is not a valid int"),
        ("a: 1\n? [b]\n: 2\n", "run.yaml:2: not valid YAML: a key must be a scalar"),
        ("? {b: 1}\n: 2\n", "a key must be a scalar"),
        ("a: " + "[" * 5_000 + "]" * 5_000, "nested too deeply"),
        ("a: &a\n  b: *a\n", "refers to itself"),
        ("a: &a [*a]\n", "refers to itself"),
        ('a: "\\U00110000"\n', "run.yaml: not valid YAML"),
        ("a: \0\n", "run.yaml: not valid YAML"),
        ('extends: "a\\0b"\n', "cannot be read"),
    ],
)
def test_what_yaml_stumbles_over_is_one_line(write, text, expected):
    (line,) = problems(write(text))
    assert expected in line
    if text.startswith("a: ") and text.count("\n") < 2:
        (line,) = problems(write(GOOD), f"data.path={text[3:].rstrip()}")
        assert line.startswith("command line: data.path: ")


@pytest.mark.parametrize("value", [10**13 + 1, 2**63 - 1, 2**64, -1])
@pytest.mark.parametrize(
    "key",
    [
        "seed model.d_model model.n_layers model.n_heads model.seq_len model.vocab_size",
        "model.padded_vocab_size model.embedding.base model.embedding.knots model.embedding.rank",
        "train.steps train.global_batch_size train.eval_every optim.warmup_steps parallel.tp",
        "checkpoint.every data.shuffle_window",
    ],
)
def test_integers_are_bounded(write, key, value):
    for name in key.split():
        if (name, value) not in (("seed", 10**13 + 1), ("seed", 2**63 - 1)):
            assert name in "\n".join(problems(write(GOOD), f"{name}={value}"))


def test_size_and_depth_are_bounded(write):
    bomb = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 64)]
    (line,) = problems(write("\n".join(bomb)))
    assert "run.yaml:16: not valid YAML: more than 100,000 values" in line
    assert "nested more than" in problems(write("a: " + "[" * 60 + "]" * 60))[0]
    with raises_error("config.too_large", "/dev/zero"):
        load_config(Path("/dev/zero"), [], RunConfig)
    with raises_error("config.invalid_override"):
        load_config(write(GOOD), [".".join(["a"] * 3000) + "=1"], RunConfig)


def test_a_date_is_text(write):
    config = load_config(write(GOOD), ["run_dir=2024-02-30", "data.path=2024-02-29"], RunConfig)
    assert (config.run_dir, config.data.path) == (Path("2024-02-30"), Path("2024-02-29"))
    assert parse_config(dump_config(config), RunConfig) == config


def test_merge_keys_are_laid_under_their_section(write):
    text = GOOD.replace("optim: {lr: 1e-3}", "optim: &o {lr: 1e-3, eps: 1e-7}")
    extra = "engine:\n  extra:\n    a: &b {<<: *o, lr: 2}\n    c: {<<: [*b], eps: 3}\n"
    extra = load_config(write(text + extra), [], RunConfig).engine.extra
    assert extra == {"a": {"lr": 2, "eps": 1e-7}, "c": {"lr": 2, "eps": 3}}
    assert "appears twice" in problems(write("a: &a {b: 1}\nc: {<<: *a, <<: *a}\n"))[0]


def test_a_path_is_called_a_path(write):
    assert problems(write(GOOD), "data.path=[1]") == [
        "command line: data.path: found [1], expected a path"
    ]


def test_another_sort_of_configuration_is_one_sentence():
    with pytest.raises(ConfigError) as caught:
        load_config("configs/run/quickstart.yaml", ["out=x"], PrepConfig)
    assert "found a run configuration" in str(caught.value)
    assert "expected a dataset configuration" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    with raises_error("config.wrong_type"):
        load_config("configs/data/quickstart.yaml", [], RunConfig)


@pytest.mark.parametrize("key", ["optim.eps", "model.norm_eps"])
def test_an_epsilon_that_is_zero_in_float32_is_refused(write, key):
    (line,) = problems(write(GOOD), f"{key}=1e-50")
    assert line.startswith(f"command line: {key}: found 1e-50, expected at least 1.17549e-38")
    load_config(write(GOOD), [f"{key}=1.2e-38"], RunConfig)
