"""The input embeddings by `kind`; see `leviathan.config.embeddings`."""

from functools import cache

from leviathan.config.embeddings import kind_class
from leviathan.config.run import ModelConfig
from leviathan.model.embeddings.base import InputEmbedding


def build_embedding(config: ModelConfig) -> InputEmbedding:
    """The input embedding described by `config.embedding`, with uninitialized parameters."""
    return embedding_class(config.embedding.kind)(config, config.embedding)


@cache
def embedding_class(kind: str) -> type[InputEmbedding]:
    """The module class of a kind."""
    return kind_class(__name__, kind, InputEmbedding)
