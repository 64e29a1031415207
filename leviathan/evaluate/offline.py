"""Disables network access of the Hugging Face libraries and redirects their dataset cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets.config
import huggingface_hub.constants

_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


@contextmanager
def offline() -> Iterator[None]:
    """Makes the Hub libraries refuse all requests; also sets values already read from variables."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))
    try:
        with (
            _replaced(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            _replaced(datasets.config, "HF_HUB_OFFLINE", True),
            _replaced(datasets.config, "HF_DATASETS_OFFLINE", True),
        ):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def dataset_cache(folder: Path) -> Iterator[None]:
    """Converts datasets in `folder`, because the user's cache may contain older data."""
    with _replaced(datasets.config, "HF_DATASETS_CACHE", folder):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
