"""lm-eval's seven tasks from files: found, read through, and the same numbers as its own model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from errors import raises_error
from seven import ITEMS, TASKS, write_items

from leviathan.evaluate.harness.model import (
    BUILTIN,
    LeviathanLM,
    evaluate_model,
    results_table,
    run_tasks,
)
from leviathan.evaluate.harness.tasks import RECORDS, check_records, definitions, find_task_files
from leviathan.evaluate.harness.tasks import TASKS as EVAL
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.hf.export import export

SAMPLE_TOLERANCE = 1e-3  # nats a request of up to 100 tokens, fp32, other kernels


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_all_seven_run_without_a_network(wide_run: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "data").mkdir()
    out = tmp_path / "out"
    result = run_tasks(wide_run, TASKS, write_items(tmp_path / "data", form), out=out)
    counts = [count["effective"] for count in result["n-samples"].values()]
    assert sorted(counts) == sorted(map(len, ITEMS.values()))
    assert set(result["results"]) == set(TASKS)
    assert result["leviathan"]["rolling"]["wikitext"]["tokens"] > 96  # more than one window
    assert result["leviathan"]["not_finite"] == []
    assert json.loads((out / "lm_eval.json").read_text()) == result
    lines = (out / "lm_eval_piqa.jsonl").read_text().splitlines()
    assert [json.loads(line)["doc"]["goal"] for line in lines] == ["Break a line."] * 3
    table = results_table(result)
    assert "token perplexity" in table
    assert "acc_norm" in table


@pytest.mark.usefixtures("no_network")
def test_equals_the_exported_model_under_lm_evals_own(wide_run: Path, tmp_path: Path) -> None:
    """Every log-likelihood of every sample: native, exported and read by us, and by lm-eval."""
    from lm_eval.models.huggingface import HFLM

    (tmp_path / "data").mkdir()
    data = write_items(tmp_path / "data")
    own = definitions(TASKS, data, BUILTIN)
    export(wide_run, tmp_path / "llama", add_bos=True)

    found = {}
    for name, path, size in (("native", wide_run, 4), ("folder", tmp_path / "llama", 1)):
        loaded = open_checkpoint(path)
        model = LeviathanLM(loaded.model, loaded.tokenizer, size)
        found[name] = evaluate_model(model, TASKS, own, local=True)[1]
    theirs = HFLM(pretrained=str(tmp_path / "llama"), device="cpu", batch_size=4)
    short = [task for task in TASKS if task != "wikitext"]
    found["lm-eval"] = evaluate_model(theirs, short, own, local=True)[1]
    # lm-eval puts the prefix before a rolling window itself: with the tokenizer's it would be two.
    theirs.add_bos_token = False
    found["lm-eval"] |= evaluate_model(theirs, ["wikitext"], own, local=True)[1]

    expected = {task: list(map(_scores, found["native"][task])) for task in TASKS}
    assert len({score for scores in expected["hellaswag"] for score in scores}) >= 4
    for name in ("folder", "lm-eval"):
        for task in TASKS:
            scores = [_scores(sample) for sample in found[name][task]]
            assert len(scores) == len(expected[task])
            for ours, other in zip(expected[task], scores, strict=True):
                assert other == pytest.approx(ours, abs=SAMPLE_TOLERANCE), (name, task)


def _scores(sample: dict[str, Any]) -> list[float]:
    """The log-likelihoods of one sample's requests."""
    return [_first(answer[0]) for answer in sample["resps"]]


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, tuple | list) else value)


def test_shared_samples_are_found_and_whole(shared: Path) -> None:
    folder = shared / "data" / "eval"
    assert definitions(TASKS, folder, BUILTIN).keys() == set(TASKS)
    file = find_task_files(folder, "hellaswag", "validation")
    assert check_records("hellaswag", file) == 200


def test_every_definition_has_its_rows() -> None:
    assert {file.stem for file in EVAL.glob("*.yaml")} == {*RECORDS, "next_line"}


def test_from_the_hub_without_a_folder() -> None:
    assert definitions(["piqa", "some_other"], None, BUILTIN) == {}
    with raises_error("tasks.no_data", "--task-data", "next_line"):
        definitions(["next_line"], None, BUILTIN)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], ("tasks.not_found",)),
        (["piqa_test.jsonl", "x.jsonl"], ("tasks.not_found", "validation", "piqa_test.jsonl")),
        (["piqa_validation.jsonl", "old/piqa_val.jsonl"], ("tasks.ambiguous",)),
        (["piqa/validation-00000-of-00002.parquet"], ("tasks.incomplete",)),
    ],
)
def test_what_is_looked_for_is_told(tmp_path: Path, files: list[str], reason: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with raises_error(*reason):
        find_task_files(tmp_path, "piqa", "validation")
    with raises_error("tasks.not_found", tmp_path / "nowhere", "piqa"):
        find_task_files(tmp_path / "nowhere", "piqa", "validation")


@pytest.mark.parametrize(
    "name",
    [
        "piqa_validation.sample.jsonl",
        "PIQA/plain_text/valid-00000-of-00001.parquet",
        "a/piqa-dev.json",
    ],
)
def test_how_files_may_be_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "piqa_train.jsonl").touch()
    assert find_task_files(tmp_path, "piqa", "validation") == [tmp_path / name]


def test_a_folder_that_is_named_after_the_task(tmp_path: Path) -> None:
    folder = tmp_path / "hellaswag"
    folder.mkdir()
    shards = [folder / f"validation-0000{number}-of-00002.parquet" for number in range(2)]
    for shard in shards:
        shard.touch()
    assert find_task_files(folder, "hellaswag", "validation") == shards


def test_a_linked_folder_of_task_files(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/piqa_validation.jsonl").touch()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/link").symlink_to(tmp_path / "elsewhere")
    expected = [tmp_path / "tasks/link/piqa_validation.jsonl"]
    assert find_task_files(tmp_path / "tasks", "piqa", "validation") == expected


def changed(name: str, **columns: Any) -> str:
    return json.dumps(ITEMS[name][0] | columns)


@pytest.mark.parametrize(
    ("name", "line", "named"),
    [
        ("hellaswag_validation", "", "jsonl"),
        ("hellaswag_validation", "[1", "jsonl:1"),
        ("hellaswag_validation", "7", "jsonl:1"),
        ("hellaswag_validation", changed("hellaswag_validation", label=""), "label"),
        ("hellaswag_validation", changed("hellaswag_validation", endings="a"), "endings"),
        ("arc_easy_test", changed("arc_easy_test", answerKey="E"), "answerKey"),
        ("arc_easy_test", changed("arc_easy_test", choices=["a"]), "choices"),
        ("piqa_validation", changed("piqa_validation", label=2), "label"),
        (
            "piqa_validation",
            json.dumps({"goal": "x"}),
            "sol1",
        ),
        ("winogrande_xl_validation", changed("winogrande_xl_validation", answer=""), "answer"),
        ("winogrande_xl_validation", changed("winogrande_xl_validation", sentence="x"), "sentence"),
        ("lambada_openai_test", json.dumps({"text": "word"}), "word"),
        ("wikitext_test", json.dumps({"text": "x"}), "page"),
    ],
)
def test_rows_that_would_be_scored_as_something_else(
    tmp_path: Path, name: str, line: str, named: str
) -> None:
    file = tmp_path / f"{name}.jsonl"
    file.write_text(line)
    task = name.rpartition("_")[0].removesuffix("_xl")
    code = "tasks.empty" if not line.strip() else "tasks.invalid_record"
    with raises_error(code, file.name, named):
        definitions([task], tmp_path, BUILTIN)


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "piqa_validation.parquet").write_bytes(b"PAR1 is not enough")
    with raises_error("tasks.unreadable", "piqa_validation.parquet"):
        definitions(["piqa"], tmp_path, BUILTIN)


def test_damaged_llama_folder(wide_run: Path, tmp_path: Path) -> None:
    export(wide_run, tmp_path / "llama")
    assert open_checkpoint(tmp_path / "llama").tokenizer.fingerprint == (
        open_checkpoint(wide_run).tokenizer.fingerprint
    )

    def broken(name: str, old: str, new: str) -> Path:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "llama", folder)
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        return folder

    for name, old, new, reason in (
        ("config.json", '"llama"', '"gpt2"', ("import.unsupported_config", "model_type", "gpt2")),
        (
            "config.json",
            '"rope_scaling": null',
            '"rope_scaling": {"factor": 8}',
            ("import.unsupported_config", "rope_scaling"),
        ),
        (
            "config.json",
            '"hidden_size": 16',
            '"hidden_size": 32',
            ("import.unsupported_config", "head_dim"),
        ),
        (
            "config.json",
            '"num_hidden_layers": 2',
            '"num_hidden_layers": 3',
            ("import.missing_tensor", "model.lay"),
        ),
        (
            "config.json",
            '"num_hidden_layers": 2',
            '"num_hidden_layers": 1',
            ("import.unknown_tensor",),
        ),
        (
            "config.json",
            '"intermediate_size": 64',
            '"intermediate_size": 32',
            ("import.wrong_shape", "16", "32"),
        ),
        ("config.json", "{", "", ("import.unreadable",)),
        ("tokenizer.json", '"Split"', '"Splat"', ("import.unsupported_tokenizer", "pre_tokenizer")),
    ):
        with raises_error(*reason):
            open_checkpoint(broken(name, old, new))
    folder = broken("config.json", "{", "{")
    (folder / "model.safetensors").write_bytes(b"short")
    with raises_error("import.unreadable", "model.safetensors"):
        open_checkpoint(folder)
