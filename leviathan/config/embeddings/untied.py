"""A separate table."""

from typing import ClassVar, Literal

from leviathan.config.embeddings.base import InputEmbeddingConfig


class UntiedConfig(InputEmbeddingConfig):
    """Separate `V × D` table: 50 % more parameters at 400M."""

    model_card: ClassVar[str] = "The input embedding is a separate table (untied)."
    kind: Literal["untied"] = "untied"

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D."""
        return vocabulary * d_model

    def sharded_parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D: each rank has the vectors of some of the ids."""
        return vocabulary * d_model
