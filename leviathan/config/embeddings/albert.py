"""Factorized table of ALBERT."""

from typing import ClassVar, Literal

from pydantic import Field

from leviathan.config.base import Dimension
from leviathan.config.embeddings.base import InitStd, MatchedConfig, function_of_id


class AlbertConfig(MatchedConfig):
    """`V × E` table, then a linear map to D. Source: ALBERT, arXiv 1909.11942, section 3.1."""

    model_card: ClassVar[str] = function_of_id("a narrow table and a linear map (as in ALBERT)")
    free_width: ClassVar[str] = "width"
    kind: Literal["albert"] = "albert"
    width: Dimension | None = Field(
        default=None, description="table width (E); null: derived from target_params"
    )
    embedding_init_std: InitStd = 0.02

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·E + E·D."""
        return self.free * (vocabulary + d_model)

    def multiply_adds(self, d_model: int) -> int:
        """E·D."""
        return self.free * d_model
