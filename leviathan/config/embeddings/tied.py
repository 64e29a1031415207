"""A table that is shared with the output head."""

from typing import ClassVar, Literal

from leviathan.config.embeddings.base import InputEmbeddingConfig


class TiedConfig(InputEmbeddingConfig):
    """`V × D` table shared with the output head: the main baseline."""

    model_card: ClassVar[str] = "The input embedding is the table of the output head (tied)."
    kind: Literal["tied"] = "tied"

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D; the output head shares them."""
        return vocabulary * d_model

    def sharded_parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D: each rank has the vectors of some of the ids."""
        return vocabulary * d_model
