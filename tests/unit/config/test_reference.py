"""docs/configuration.md is up to date and describes every key."""

import re

import pytest

from leviathan.config import reference
from leviathan.config.data import PrepConfig
from leviathan.config.experiment import ExperimentConfig
from leviathan.config.explain import _all_keys
from leviathan.config.run import RunConfig


def test_the_page_is_up_to_date():
    assert reference.PAGE.read_text() == reference.page(), "run `make docs`"


def test_the_table_of_resumable_keys_is_up_to_date():
    text = reference.CHECKPOINTS_PAGE.read_text()
    assert text == reference.checkpoints_page(text), "run `make docs`"
    assert "| `tracking` |" in text


@pytest.mark.parametrize("schema", [RunConfig, PrepConfig, ExperimentConfig])
def test_every_key_has_a_row_with_a_meaning(schema):
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \| (.+) \|$", reference.page(), re.MULTILINE)
    assert {path[-1] for path in _all_keys(schema)} <= {row[0] for row in rows}
    assert all(meaning.strip() for *_, meaning in rows)


@pytest.mark.parametrize(
    "row",
    [
        "| `steps` | integer > 0, ≤ 1,000,000,000 | *required* | number of optimizer steps |",
        "| `d_ff` | integer > 0, ≤ 16,777,216 | *4 · d_model* | hidden width of the SwiGLU MLP |",
        "| `betas` | list of number ≥ 0, < 1 | `[0.9, 0.999]` | AdamW's β₁ and β₂ |",
        "| `fraction` | number ≥ 0, < 1 | `0.005` | fraction of documents held out by content "
        "hash; ignored with paths or hub |",
        "| `base` | integer ≥ 2, ≤ 2,147,483,648, `null` | `null` | base of the digits (b); null: "
        "the smallest b with b^k ≥ V |",
    ],
)
def test_types_ranges_and_defaults(row):
    assert row in reference.page().splitlines()
