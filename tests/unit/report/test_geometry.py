"""Geometry of tables whose answer is known, and the command on a real checkpoint."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from leviathan.report.geometry import (
    geometry,
    inspect,
    inspect_text,
    isotropy,
    mean_cosine,
    neighbors,
    similarity,
)

RANDOM = np.random.default_rng(0)


def test_equal_axes_have_full_rank():
    table = np.concatenate([np.eye(6), -np.eye(6)])
    found = geometry(table)
    assert found["effective_rank"] == pytest.approx(6)
    assert found["mean_share"] == pytest.approx(0)
    assert found["isotropy"] == pytest.approx(1)
    assert found["mean_cosine"] == pytest.approx(-1 / 11)  # one opposite among eleven others
    assert found["distinct"] == 12
    assert found["norm"]["mean"] == 1


def test_one_direction_has_rank_one_and_is_not_isotropic():
    table = np.outer(np.linspace(1, 2, 50), np.ones(5))
    found = geometry(table)
    assert found["effective_rank"] == pytest.approx(1, abs=1e-6)
    assert found["axes_for_90_percent"] == 1
    assert found["mean_cosine"] == pytest.approx(1)
    assert found["isotropy"] < 0.2


def test_mean_cosine_is_that_of_all_pairs():
    table = RANDOM.normal(size=(20, 4))
    units = table / np.linalg.norm(table, axis=1, keepdims=True)
    pairs = (units @ units.T)[~np.eye(20, dtype=bool)]
    assert mean_cosine(table) == pytest.approx(pairs.mean())


def test_isotropy_does_not_depend_on_the_scale():
    table = RANDOM.normal(size=(300, 8))
    assert isotropy(0.01 * table) == pytest.approx(isotropy(7 * table))


def test_by_frequency_and_rank_correlation():
    counts = np.array([0, 5, 50, 500, 5_000, 50_000])
    table = np.eye(6) * np.arange(1, 7)[:, None]
    found = geometry(table, counts)
    assert [row["bucket"] for row in found["by_frequency"]][:3] == ["0", "1–9", "10–99"]
    assert found["by_frequency"][2]["norm"]["median"] == 3
    assert found["rank_correlation"] == pytest.approx(1)


def test_nearest_neighbors():
    table = np.array([[1.0, 0], [2, 0.1], [0, 1], [-1, 0]])
    ((first, *_, last),) = neighbors(table, [0], count=3)
    assert first["id"] == 1
    assert last == {"id": 3, "cosine": -1.0}


def test_similarity_knows_no_rotation_or_scale():
    table = RANDOM.normal(size=(200, 5))
    turn, _ = np.linalg.qr(RANDOM.normal(size=(5, 5)))
    assert similarity(table, 3 * table @ turn) == pytest.approx(1)
    assert similarity(table, RANDOM.normal(size=(200, 5))) < 0.2


@dataclass(frozen=True)
class Made:
    label: str
    values: np.ndarray
    counts: np.ndarray | None = None
    identity: Any = None

    def text(self, id: int) -> str:
        return f"t{id}"


def test_side_by_side(tmp_path):
    counts = np.arange(40) ** 3
    tables = [
        Made(name, RANDOM.normal(size=(40, d)), counts, {}) for name, d in (("a", 4), ("b", 8))
    ]
    result = inspect(tables, [3], tmp_path)
    assert 0 < result["similarity"] < 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "inspect.json", "spectrum.svg", "spectrum.png", "norms.svg", "norms.png",
    }  # fmt: skip
    text = inspect_text(result)
    assert "Nearest to 't3' (id 3, 27 times in training)" in text
    assert "linear CKA" in text
