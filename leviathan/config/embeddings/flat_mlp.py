"""A narrow table followed by an MLP."""

from typing import ClassVar, Literal, Self

from pydantic import Field

from leviathan.config.base import Dimension
from leviathan.config.embeddings.base import InitStd, MatchedConfig, function_of_id


class FlatMLPConfig(MatchedConfig):
    """`V × e` table, then a two-layer SiLU MLP: hidden width H with a bias, no output bias.

    The table gets about half of the target; H is derived from the rest.
    """

    model_card: ClassVar[str] = function_of_id("a narrow table and a two-layer MLP")
    free_width: ClassVar[str] = "hidden"
    kind: Literal["flat_mlp"] = "flat_mlp"
    width: Dimension | None = Field(
        default=None, description="table width (e); null: V·e is about half of target_params"
    )
    hidden: Dimension | None = Field(
        default=None, description="hidden width (H); null: derived from target_params"
    )
    embedding_init_std: InitStd = 0.02

    @property
    def table_width(self) -> int:
        """e; it must be set or resolved."""
        assert self.width is not None, "not resolved"
        return self.width

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·e + H·(e + 1 + D)."""
        e = self.table_width
        return vocabulary * e + self.free * (e + 1 + d_model)

    def multiply_adds(self, d_model: int) -> int:
        """e·H + H·D."""
        return self.free * (self.table_width + d_model)

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in e, then H."""
        if self.width is not None:
            return super().resolved(vocabulary, d_model)
        width = max(1, round(self.target(vocabulary, d_model) / 2 / vocabulary))
        return self.model_copy(update={"width": width}).resolved(vocabulary, d_model)
