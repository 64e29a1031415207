"""Tiny models."""

from collections.abc import Callable

import pytest

from leviathan.config.run import ModelConfig
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM

# 1,216 parameters of LEV; 96 and 32 as below.
SMALL: dict[str, dict] = {
    "leviathan": {"d_seed": 8, "heads": 2, "knots": 5, "rank": 4},
    "leviathan_v1": {"d_seed": 8, "modes": 2, "knots": 5, "rank": 4},
    "albert": {"target_params": 1216},
    "flat_mlp": {"target_params": 1216},
    "factored_mlp": {"target_params": 1216, "d_seed": 8},
}


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """A model configuration of a few thousand parameters; fields can be changed by name.

    `lev` holds further fields of the input embedding, whatever its kind.
    """

    def make(kind: str = "leviathan", lev: dict | None = None, **fields) -> ModelConfig:
        embedding = {"kind": kind} | SMALL.get(kind, {}) | (lev or {})
        shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "seq_len": 16}
        vocabulary = {"vocab_size": 90, "padded_vocab_size": 96}
        return ModelConfig.model_validate(shape | vocabulary | {"embedding": embedding} | fields)

    return make


@pytest.fixture
def make_model(make_config) -> Callable[..., CausalLM]:
    """An initialized model of `make_config`."""

    def make(kind: str = "leviathan", seed: int = 7, **fields) -> CausalLM:
        config = make_config(kind, **fields)
        model = CausalLM(config)
        init_weights(model, config, seed)
        return model

    return make
