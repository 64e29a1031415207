"""Log-likelihoods as requested by lm-eval, compared with one plain forward pass per request."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from errors import raises_error
from lm_eval.api.instance import Instance

from leviathan.evaluate.harness.model import LeviathanLM, results_table, run_tasks
from leviathan.evaluate.scoring import LoadedCheckpoint, open_checkpoint

TOLERANCE = 1e-4  # nats a request, fp32, over batch sizes and orders

PAIRS = [
    ("def wrap(text,", " width=70):"),
    ("class TextWrapper:\n", "    pass"),
    ("return self", "."),
    ("", "import re"),
    ("import json\n" * 30, "import re"),
    ("a", " b"),
    ("    for line in lines:\n", "        yield line"),
    ("x = ", "[chunk for chunk in chunks]"),
]
TEXTS = ["import re", "def wrap(text):\n    return text\n" * 12, "é → ü", "a" * 31]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i, metadata=("task", i, 1))  # pyright: ignore
        for i, args in enumerate(arguments)
    ]


@pytest.fixture(scope="module", params=["tied", "leviathan"])
def loaded(request: pytest.FixtureRequest, runs: dict[str, Path]) -> LoadedCheckpoint:
    return open_checkpoint(runs[request.param])


def model_of(loaded: LoadedCheckpoint, batch_size: int = 4) -> LeviathanLM:
    return LeviathanLM(loaded.model, loaded.tokenizer, batch_size)


def plain(
    loaded: LoadedCheckpoint, context: list[int], continuation: list[int]
) -> tuple[float, bool]:
    """One forward pass over exactly these ids, full log-softmax."""
    ids = (context + continuation)[-(loaded.model_config.seq_len + 1) :]
    logits = loaded.model.logits(torch.tensor([ids[:-1]]))[0].double()
    logits = logits[-len(continuation) :].log_softmax(-1)
    picked = logits[range(len(continuation)), continuation]
    return float(picked.sum()), logits.argmax(-1).tolist() == continuation


def test_loglikelihood_is_that_of_a_document_start(loaded: LoadedCheckpoint) -> None:
    model = model_of(loaded)
    found = model.loglikelihood(requests("loglikelihood", PAIRS))
    encode, end = loaded.tokenizer.encode, loaded.tokenizer.end_of_text
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        before = encode(context.rstrip())
        rest = encode(context + continuation)[len(before) :]  # as lm-eval cuts it
        expected = plain(loaded, [end, *before], rest)
        assert value == pytest.approx(expected[0], abs=TOLERANCE)
        assert greedy == expected[1]
    assert model.rows.truncated == 1  # the 30 imports
    assert len({round(value, 3) for value, _ in found}) == len(PAIRS)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("backwards", [False, True])
def test_batching_changes_no_score(
    loaded: LoadedCheckpoint, batch_size: int, backwards: bool
) -> None:
    alone = [
        model_of(loaded, 1).loglikelihood(requests("loglikelihood", [pair]))[0] for pair in PAIRS
    ]
    pairs = PAIRS[::-1] if backwards else PAIRS
    found = model_of(loaded, batch_size).loglikelihood(requests("loglikelihood", pairs))
    found = found[::-1] if backwards else found
    for (value, greedy), (expected, expected_greedy) in zip(found, alone, strict=True):
        assert abs(value - expected) <= TOLERANCE
        assert greedy == expected_greedy


def test_prefix_stands_once(loaded: LoadedCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every context exactly once, the literal text of the token notwithstanding."""
    end, seen = loaded.tokenizer.end_of_text, []
    model = model_of(loaded)
    score = model.rows.score
    monkeypatch.setattr(model.rows, "score", lambda pairs: seen.extend(pairs) or score(pairs))
    pairs = [*PAIRS, ("<|endoftext|>a", " b")]
    model.loglikelihood(requests("loglikelihood", pairs))
    for context, continuation in seen:
        assert context[0] == end
        assert (context + continuation).count(end) == 1


def test_rolling_scores_each_token_once(loaded: LoadedCheckpoint) -> None:
    model, end = model_of(loaded), loaded.tokenizer.end_of_text
    for text in TEXTS:
        ids, windows = loaded.tokenizer.encode(text), model.rolling_windows(text)
        assert [token for _, scored in windows for token in scored] == ids
        assert windows[0][0] == [end]
        before = 0
        for context, scored in windows:
            assert len(context) + len(scored) <= loaded.model_config.seq_len + 1
            if before:  # later windows begin inside the text, as rows of the training data do
                assert context == ids[before - len(context) : before]
            before += len(scored)
    assert len(model.rolling_windows(TEXTS[1])) > 2


@pytest.mark.parametrize("batch_size", [1, 16])
def test_rolling_loglikelihood(loaded: LoadedCheckpoint, batch_size: int) -> None:
    model = model_of(loaded, batch_size)
    rolling = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    for text, value in zip(TEXTS, model.loglikelihood_rolling(rolling), strict=True):
        expected = sum(plain(loaded, *window)[0] for window in model.rolling_windows(text))
        assert value == pytest.approx(expected, abs=TOLERANCE)


def test_token_across_the_border(loaded: LoadedCheckpoint) -> None:
    """Where one token covers both sides, the continuation is still scored, all of it."""
    encode = loaded.tokenizer.encode
    whole = next(
        word
        for word in ("return", "self", "import", "lines")
        if len(encode(word)) == 1 and len(encode(word[:3])) == 1
    )
    model = model_of(loaded)
    value, _ = model.loglikelihood(requests("loglikelihood", [(whole[:3], whole[3:])]))[0]
    assert model.spanning == 1
    context = [loaded.tokenizer.end_of_text, *encode(whole[:3])]
    assert value == pytest.approx(plain(loaded, context, encode(whole[3:]))[0], abs=TOLERANCE)


def test_continuation_that_does_not_fit(loaded: LoadedCheckpoint) -> None:
    with raises_error("tasks.too_long", 32):
        model_of(loaded).loglikelihood(requests("loglikelihood", [("a", " b c" * 50)]))


def test_generation_is_greedy_and_stops(loaded: LoadedCheckpoint) -> None:
    model, encode = model_of(loaded), loaded.tokenizer.encode
    whole = model.generate_until(requests("generate_until", [("def", {"max_gen_toks": 12})]))[0]
    ids = [loaded.tokenizer.end_of_text, *encode("def")]
    made: list[int] = []
    while len(made) < 12:
        made.append(int(loaded.model.logits(torch.tensor([ids + made]))[0, -1].argmax()))
        if made[-1] == loaded.tokenizer.end_of_text:
            made.pop()
            break
    assert whole == loaded.tokenizer.decode(made)
    stop = whole[len(whole) // 2 :][:2] or whole
    options = {"max_gen_toks": 12, "until": ["\0", stop]}
    cut = model.generate_until(requests("generate_until", [("def", options)]))[0]
    assert cut == whole[: whole.index(stop)]
    with raises_error("tasks.unsupported", "do_sample"):
        model.generate_until(requests("generate_until", [("def", {"do_sample": True})]))


def test_no_prompt_is_truncated_to_fit_the_new_tokens(
    loaded: LoadedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of 256 new tokens is eight times this model's context of 32."""
    model, seen = model_of(loaded), []
    generate = model.rows.generate

    def spy(contexts, new_tokens, end, on_token):
        seen.extend(contexts)
        return generate(contexts, new_tokens, end, on_token)

    monkeypatch.setattr(model.rows, "generate", spy)
    prompts = ["def wrap(text,", "import", "x = " * 40]
    made = model.generate_until(requests("generate_until", [(text, {}) for text in prompts]))
    encoded = {
        text: [loaded.tokenizer.end_of_text, *loaded.tokenizer.encode(text)] for text in prompts
    }
    assert encoded[prompts[0]] in seen
    assert encoded[prompts[1]] in seen
    assert encoded[prompts[2]][-16:] in seen  # it fills the context: half of it is kept
    counts = model.truncation["task"]
    assert (counts.contexts, counts.capped_generations) == (1, 3)
    assert counts.tokens == len(encoded[prompts[2]]) - 16
    # Each equals the output of the model for that prompt, up to the end of the context.
    for text, found in zip(prompts[:2], made[:2], strict=True):
        ids = list(encoded[text])
        while len(ids) < 32:
            ids.append(int(loaded.model.logits(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == loaded.tokenizer.end_of_text:
                ids.pop()
                break
        assert found == loaded.tokenizer.decode(ids[len(encoded[text]) :])


def test_options_of_generation(loaded: LoadedCheckpoint) -> None:
    model = model_of(loaded)

    def run(**options) -> str:
        return model.generate_until(requests("generate_until", [("def", options)]))[0]

    assert run(max_new_tokens=3) == run(max_gen_toks=3, num_beams=1) == run(max_tokens=3)
    assert run(max_gen_toks=3) != run(max_gen_toks=9)
    for options in ({"num_beams": 4}, {"suppress_tokens": [1]}, {"max_length": 20}):
        (key,) = options
        with raises_error("tasks.unsupported", f"generation_kwargs.{key}"):
            run(**options)


@pytest.mark.usefixtures("no_network")
def test_truncation_is_reported(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By task, on the console and in the results."""
    encode = open_checkpoint(runs["tied"]).tokenizer.encode
    contexts = ["import re\n" * 20, "import re\n"]
    choices = ["import json", "pass"]
    items = [{"context": text, "choices": choices, "answer": 0} for text in contexts]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    result = run_tasks(runs["tied"], ["next_line"], tmp_path)["leviathan"]
    whole = [1 + len(encode(contexts[0] + choice)) for choice in choices]
    lost = sum(length - 33 for length in whole)
    assert result["truncated_contexts"] == 2
    assert result["truncated_tokens"] == lost > 0
    assert result["capped_generations"] == 0
    assert result["truncation"] == {
        "next_line": {"contexts": 2, "tokens": lost, "capped_generations": 0}
    }
    printed = capsys.readouterr().err
    assert "next_line: 2 context(s) did not fit the model's context of 32 tokens" in printed
    assert f"by a total of {lost:,} tokens" in printed


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choices")
    lines = ["import re", "import json", "    return text", "class A:"]
    items = [
        {"context": f"# {number}\n{lines[number % 4]}\n", "choices": lines, "answer": number % 3}
        for number in range(12)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


@pytest.mark.usefixtures("no_network")
def test_next_line(runs: dict[str, Path], choices: Path) -> None:
    result = run_tasks(runs["tied"], ["next_line"], choices)
    loaded = open_checkpoint(runs["tied"])
    right = 0
    for line in (choices / "choices.jsonl").read_text().splitlines():
        item = json.loads(line)
        pairs = [(item["context"], choice) for choice in item["choices"]]
        scores = model_of(loaded).loglikelihood(requests("loglikelihood", pairs))
        best = max(range(4), key=lambda index: scores[index][0])
        right += best == item["answer"]
    assert result["results"]["next_line"]["acc,none"] == pytest.approx(right / 12)
    assert result["results"]["next_line"]["acc_stderr,none"] > 0 or right in (0, 12)
    assert result["n-samples"]["next_line"] == {"original": 12, "effective": 12}
    filed = runs["tied"] / "evaluation" / "step-00000020" / "lm_eval.json"
    assert json.loads(filed.read_text()) == result
    assert "next_line" in results_table(result)


@pytest.mark.usefixtures("no_network")
def test_a_directory_with_yaml_syntax_in_its_name(
    runs: dict[str, Path], choices: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(choices, tmp_path / 'it\'s a: "#1" # [x]'))
    result = run_tasks(runs["tied"], ["next_line"], folder, limit=3)
    assert result["n-samples"]["next_line"]["effective"] == 3


def test_limit(runs: dict[str, Path], choices: Path) -> None:
    result = run_tasks(runs["leviathan"], ["next_line"], choices, limit=5, batch_size=3)
    assert result["n-samples"]["next_line"]["effective"] == 5


def test_not_finite_is_no_number(
    runs: dict[str, Path], choices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = open_checkpoint(runs["tied"])
    with torch.no_grad():
        loaded.model.model.norm.weight.fill_(math.nan)
    monkeypatch.setattr("leviathan.evaluate.harness.model.open_checkpoint", lambda *_: loaded)
    monkeypatch.setattr(LoadedCheckpoint, "result_dir", lambda self: None)
    result = run_tasks(runs["tied"], ["next_line"], choices)
    assert result["results"]["next_line"]["acc,none"] is None
    assert result["leviathan"]["not_finite"] == ["next_line"]
    assert "not a number" in results_table(result)


def test_local_task_without_its_data(runs: dict[str, Path], tmp_path: Path) -> None:
    with raises_error("tasks.no_data", "--task-data", "next_line"):
        run_tasks(runs["tied"], ["next_line"])
    with raises_error("tasks.not_found", "choices.jsonl"):
        run_tasks(runs["tied"], ["next_line"], tmp_path)


ITEM = {"context": "x", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", ("tasks.empty",)),
        ("hello", ("tasks.invalid_record", "choices.jsonl:1", "JSON")),
        (json.dumps({"a": 1}), ("tasks.invalid_record",)),
        (json.dumps({"context": "x", "choices": ["a", "b"]}), ("tasks.invalid_record",)),
        (json.dumps(ITEM | {"context": None}), ("tasks.invalid_record",)),
        (json.dumps(ITEM | {"choices": "ab"}), ("tasks.invalid_record",)),
        (json.dumps(ITEM | {"choices": ["a", ""]}), ("tasks.invalid_record",)),
        (
            json.dumps(ITEM) + "\n" + json.dumps(ITEM | {"answer": 2}),
            ("tasks.invalid_record", "jsonl:2"),
        ),
    ],
)
def test_items_that_would_be_scored_as_something_else(
    runs: dict[str, Path], tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "choices.jsonl").write_text(content)
    with raises_error(*reason):
        run_tasks(runs["tied"], ["next_line"], tmp_path)


def test_requests_that_mean_nothing(runs: dict[str, Path], choices: Path) -> None:
    with raises_error("tasks.none_named", "--tasks"):
        run_tasks(runs["tied"], [], choices)
    with raises_error("cli.invalid_option", "--limit 0"):
        run_tasks(runs["tied"], ["next_line"], choices, limit=0)
    with raises_error("checkpoint.not_found", choices):
        run_tasks(choices, ["next_line"], choices)


@pytest.mark.usefixtures("no_network")
def test_unknown_task(runs: dict[str, Path], choices: Path) -> None:
    with raises_error("tasks.unknown", "'next_lin'", "'next_line'?"):
        run_tasks(runs["tied"], ["next_lin"], choices)
