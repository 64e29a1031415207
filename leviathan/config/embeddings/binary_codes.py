"""The bits of the token id, without parameters."""

from typing import ClassVar, Literal

from pydantic import Field

from leviathan.config.embeddings.base import InputEmbeddingConfig


class BinaryCodesConfig(InputEmbeddingConfig):
    """No parameters: the id's ⌈log₂V⌉ bits as ±1, tiled to D. Source: arXiv 2605.09751."""

    model_card: ClassVar[str] = (
        "The input embedding consists of the bits of the token id, without parameters. It is "
        "stored here as an ordinary, untied table."
    )
    kind: Literal["binary_codes"] = "binary_codes"
    embedding_init_std: float | None = Field(
        default=0.02, gt=0, strict=False, description="absolute value of the entries; null: 1"
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """No parameters."""
        return 0
