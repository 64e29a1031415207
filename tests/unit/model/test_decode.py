"""Generation with a cache against the model's own forward pass over everything, each time."""

import pytest
import torch

from leviathan.config.run import ModelConfig
from leviathan.model.init import init_weights
from leviathan.model.kv_cache import (
    DecodeState,
    Sampling,
    generate,
    pick,
    with_materialized_embedding,
)
from leviathan.model.transformer import CausalLM

END, VOCABULARY, CONTEXT = 0, 61, 24
CLOSE = 1e-4  # logits of size 10 in fp32, summed in another order
PROMPTS = [[5, 9, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60, 59]]


@pytest.fixture(scope="module", params=["tied", "leviathan"])
def model(request) -> CausalLM:
    lev = {"d_seed": 4, "heads": 2, "knots": 4, "rank": 3} if request.param != "tied" else {}
    config = ModelConfig.model_validate(
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "seq_len": CONTEXT}
        | {"vocab_size": VOCABULARY, "padded_vocab_size": 64, "init_std": 0.3}
        | {"embedding": {"kind": request.param} | lev}
    )
    model = CausalLM(config)
    init_weights(model, config, seed=5)
    return model.eval()


def greedy(model: CausalLM, prompt: list[int], count: int) -> list[int]:
    """By one full forward pass a token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == END:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def collect(model: CausalLM, prompts, count: int, **options) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in prompts]

    def on_token(row: int, token: int) -> bool:
        made[row].append(token)
        return True

    generate(model, prompts, count, END, on_token, **options)
    return made


def test_logits_of_rows_side_by_side(model):
    decoding = DecodeState(with_materialized_embedding(model), PROMPTS)
    rows = [list(prompt) for prompt in PROMPTS]
    for step in range(6):
        for row, found in zip(rows, decoding.logits(), strict=True):
            whole = model.logits(torch.tensor([row]))[0, -1, :VOCABULARY]
            torch.testing.assert_close(found, whole, atol=CLOSE, rtol=0)
        token = torch.tensor([step + 3 + place for place in range(len(rows))])
        decoding.append(token)
        rows = [[*row, int(id)] for row, id in zip(rows, token, strict=True)]
        if step == 2:  # rows that are done leave, the others continue undisturbed
            decoding.keep([3, 0])
            rows = [rows[3], rows[0]]


def test_greedy_text_does_not_depend_on_the_batch(model):
    expected = [greedy(model, prompt, 10) for prompt in PROMPTS]
    assert collect(model, PROMPTS, 10) == expected
    assert [collect(model, [prompt], 10)[0] for prompt in PROMPTS] == expected
    assert any(expected)


def test_rows_end_by_themselves(model):
    free = collect(model, PROMPTS, 8)
    made: list[list[int]] = [[] for _ in PROMPTS]

    def on_token(row: int, token: int) -> bool:
        made[row].append(token)
        return len(made[row]) < row + 1

    generate(model, PROMPTS, 8, END, on_token)
    assert made == [tokens[: row + 1] for row, tokens in enumerate(free)]


def test_past_the_context(model):
    """Where the context is full, a row continues from its newest half."""
    made = collect(model, [[3, 4]], CONTEXT + 10)[0]
    ids = [3, 4, *made[: CONTEXT - 1]]  # one more than the context holds
    assert made[: CONTEXT - 2] == greedy(model, [3, 4], CONTEXT - 2)
    if len(made) >= CONTEXT:
        assert made[CONTEXT - 1] == greedy(model, ids[-(CONTEXT // 2) :], 1)[0]
    long = list(range(1, CONTEXT + 9))
    assert collect(model, [long], 1) == collect(model, [long[-CONTEXT:]], 1)


def test_a_short_row_loses_nothing_to_a_long_one(model):
    """Where the batch's columns are full, a row that still fits its context is read whole again."""
    long, short = list(range(1, CONTEXT)), [3, 4]
    made: list[list[int]] = [[], []]

    def on_token(row: int, token: int) -> bool:
        made[row].append(token)
        return row == 1  # the long one ends at once

    generate(model, [long, short], CONTEXT - 2, END, on_token)
    assert made[1] == greedy(model, short, CONTEXT - 2)


def test_draws_depend_on_seed_and_row_alone(model):
    how = Sampling(temperature=1.0, top_p=0.9, seed=3)
    together = collect(model, PROMPTS, 8, sampling=how)
    assert collect(model, PROMPTS, 8, sampling=how) == together
    alone = [
        collect(model, [prompt], 8, sampling=how, first_row=row)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert alone == together
    assert collect(model, PROMPTS, 8, sampling=Sampling(1.0, 0.9, seed=4)) != together


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3, 0.0])
    logits = probabilities.log().expand(20_000, -1)
    uniform = torch.arange(20_000) / 20_000
    for top_p, kept in [(1.0, [0, 1, 2, 3]), (0.8, [1, 3]), (0.5, [1]), (0.81, [1, 2, 3])]:
        found = torch.bincount(pick(logits, Sampling(1.0, top_p), uniform), minlength=5) / 20_000
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    sharper = torch.bincount(pick(logits, Sampling(0.5), uniform), minlength=5) / 20_000
    torch.testing.assert_close(
        sharper, probabilities**2 / (probabilities**2).sum(), atol=2e-3, rtol=0
    )
    assert pick(logits[:3], Sampling(), uniform[:3]).tolist() == [1, 1, 1]


def test_materialized_shares_all_but_the_input_table(model):
    twin = with_materialized_embedding(model)
    assert twin.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    ids = torch.tensor([[1, 2, 3, 60]])
    torch.testing.assert_close(twin.logits(ids), model.logits(ids), atol=CLOSE, rtol=0)
