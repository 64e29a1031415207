"""The generator of the first version of the paper: M modes, κ knots, rank r."""

from typing import ClassVar, Literal

from pydantic import Field

from leviathan.config.base import Dimension
from leviathan.config.embeddings.base import PAPER, function_of_id
from leviathan.config.embeddings.leviathan import GeneratorConfig


class LeviathanV1Config(GeneratorConfig):
    """The generator of arXiv 2601.22040 v1: one latent for all modes, and a residual."""

    model_card: ClassVar[str] = function_of_id(
        f"generated from the digits of the token id (the generator of {PAPER}, version 1)"
    )
    kind: Literal["leviathan_v1"] = "leviathan_v1"
    modes: Dimension = Field(default=8, description="number of concatenated tensor products (M)")
    knots: int = Field(
        default=32,
        ge=2,
        le=2**20,
        description="number of uniform knots of the quadratic B-splines (κ)",
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + d² + 3·d + M·d·κ·r + M·r·D + d·D."""
        m, d, r = self.modes, self.d_seed, self.rank
        splines = m * d * self.knots * r
        output = (m * r + d) * d_model
        return self.codebook_parameters(vocabulary) + d * d + 3 * d + splines + output

    def multiply_adds(self, d_model: int) -> int:
        """Latent, splines (the dense product over κ), product over d, both outputs."""
        m, d, r = self.modes, self.d_seed, self.rank
        return d * d + m * d * self.knots * r + m * d * r + (m * r + d) * d_model
