"""Digits and codebooks of LEV followed by an MLP."""

from typing import ClassVar, Literal, Self

from pydantic import Field

from leviathan.config.base import Dimension
from leviathan.config.embeddings.base import InitStd, MatchedConfig, function_of_id
from leviathan.config.embeddings.digits import DigitConfig


class FactoredMLPConfig(MatchedConfig, DigitConfig):
    """Digits and codebooks of LEV, then a two-layer SiLU MLP as in `flat_mlp`."""

    model_card: ClassVar[str] = function_of_id(
        "generated from the digits of the token id by codebooks and a two-layer MLP"
    )
    free_width: ClassVar[str] = "hidden"
    kind: Literal["factored_mlp"] = "factored_mlp"
    hidden: Dimension | None = Field(
        default=None, description="hidden width (H); null: derived from target_params"
    )
    embedding_init_std: InitStd = 0.02

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + H·(d + 1 + D)."""
        return self.codebook_parameters(vocabulary) + self.free * (self.d_seed + 1 + d_model)

    def multiply_adds(self, d_model: int) -> int:
        """d·H + H·D."""
        return self.free * (self.d_seed + d_model)

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in b, then H."""
        base = self.base_at(vocabulary)
        if self.base is not None:
            return super().resolved(vocabulary, d_model)
        return self.model_copy(update={"base": base}).resolved(vocabulary, d_model)
