"""The input embeddings, by the `kind` that configurations name them with."""

from leviathan.config.schema import ModelConfig
from leviathan.model.embedding.base import InputEmbedding, Normal
from leviathan.model.embedding.leviathan import LeviathanEmbedding
from leviathan.model.embedding.table import TiedEmbedding

KINDS: dict[str, type[InputEmbedding]] = {
    "tied": TiedEmbedding,
    "leviathan": LeviathanEmbedding,
}


def build_embedding(config: ModelConfig) -> InputEmbedding:
    """The input embedding that `config.embedding` describes, its parameters not yet drawn."""
    return KINDS[config.embedding.kind](config)


__all__ = [
    "KINDS",
    "InputEmbedding",
    "LeviathanEmbedding",
    "Normal",
    "TiedEmbedding",
    "build_embedding",
]
