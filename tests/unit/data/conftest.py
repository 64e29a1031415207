"""What the tests of preparation share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leviathan.config.data import PrepConfig


@pytest.fixture
def config(tiny_corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> Callable[..., PrepConfig]:
    """Builds a PrepConfig; keywords replace or add keys."""

    def build(**changes: Any) -> PrepConfig:
        keys: dict[str, Any] = {
            "source": {"paths": [str(tiny_corpus)]},
            "validation": {"fraction": 0},
            "tokenizer": str(tiny_tokenizer),
            "seq_len": 32,
            "out": tmp_path / "out",
        }
        return PrepConfig.model_validate(keys | changes)

    return build
