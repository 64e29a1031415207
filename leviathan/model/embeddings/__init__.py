"""The input embeddings by `kind`; see `leviathan.config.embeddings`."""

from collections.abc import Callable
from typing import cast

from leviathan.config.embeddings import kind_class
from leviathan.config.run import ModelConfig
from leviathan.model.embeddings.base import InputEmbedding


def build_embedding(config: ModelConfig) -> InputEmbedding:
    """The input embedding described by `config.embedding`, with uninitialized parameters."""
    embedding = kind_class(__name__, config.embedding.kind, InputEmbedding)
    return cast(Callable[..., InputEmbedding], embedding)(config, config.embedding)
