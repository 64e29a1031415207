"""The input embeddings by their configuration `kind`."""

from leviathan.config.run import ModelConfig
from leviathan.model.embeddings.albert import AlbertEmbedding
from leviathan.model.embeddings.base import InputEmbedding, Normal
from leviathan.model.embeddings.binary_codes import BinaryCodesEmbedding
from leviathan.model.embeddings.factored_mlp import FactoredMLPEmbedding
from leviathan.model.embeddings.flat_mlp import FlatMLPEmbedding
from leviathan.model.embeddings.leviathan import LeviathanEmbedding
from leviathan.model.embeddings.leviathan_v1 import LeviathanV1Embedding
from leviathan.model.embeddings.table import TiedEmbedding, UntiedEmbedding

KINDS: dict[str, type[InputEmbedding]] = {
    "tied": TiedEmbedding,
    "untied": UntiedEmbedding,
    "albert": AlbertEmbedding,
    "flat_mlp": FlatMLPEmbedding,
    "factored_mlp": FactoredMLPEmbedding,
    "binary_codes": BinaryCodesEmbedding,
    "leviathan": LeviathanEmbedding,
    "leviathan_v1": LeviathanV1Embedding,
}


def build_embedding(config: ModelConfig) -> InputEmbedding:
    """The input embedding described by `config.embedding`, with uninitialized parameters."""
    return KINDS[config.embedding.kind](config)


__all__ = [
    "KINDS",
    "InputEmbedding",
    "LeviathanEmbedding",
    "Normal",
    "TiedEmbedding",
    "build_embedding",
]
