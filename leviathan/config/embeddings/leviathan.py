"""LEV, learned embedding vectorization: h heads, κ knots, rank r."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from leviathan.config.base import Dimension
from leviathan.config.embeddings.base import PAPER, InitStd, function_of_id
from leviathan.config.embeddings.digits import DigitConfig

LatentScale = Annotated[
    Literal["outside", "inside"],
    Field(description="latent scaling: outside σ(½·LN(x)), inside σ(LN(½·x))"),
]
SplineInitStd = Annotated[
    float,
    Field(
        gt=0,
        strict=False,
        description="standard deviation of the initial spline coefficients Δ",
    ),
]


class GeneratorConfig(DigitConfig):
    """Settings of both versions of the paper: digits, codebooks, splines, initialization."""

    rank: Dimension = Field(default=64, description="rank of each tensor product (r)")
    latent_scale: LatentScale = "outside"
    spline_init_std: SplineInitStd = 0.1
    embedding_init_std: InitStd = 0.02

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in b."""
        return self.model_copy(update={"base": self.base_at(vocabulary)})


class LeviathanConfig(GeneratorConfig):
    """LEV of arXiv 2601.22040 v2; the defaults give 1,205,376 + 512·D parameters at V = 200,376."""

    model_card: ClassVar[str] = function_of_id(
        f"generated from the digits of the token id (LEV of {PAPER})"
    )
    kind: Literal["leviathan"] = "leviathan"
    heads: Dimension = Field(default=8, description="number of heads, which are summed (h)")
    tp_mode: Literal["replicated", "ids", "heads"] = Field(
        default="ids",  # the fastest: see benchmarks/tensor_parallel.py
        description="tensor parallelism of LEV: replicated, or divided by ids or by heads",
    )
    knots: int = Field(
        default=16,
        ge=2,
        le=2**20,
        description="number of uniform knots of the quadratic B-splines (κ)",
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + h·d² + 3·h·d + h·d·κ·r + h·r·D."""
        h, d, r = self.heads, self.d_seed, self.rank
        head = d * d + 3 * d + d * self.knots * r + r * d_model
        return self.codebook_parameters(vocabulary) + h * head

    def multiply_adds(self, d_model: int) -> int:
        """Latents, splines (the dense product over κ), product over d, output."""
        h, d, r = self.heads, self.d_seed, self.rank
        return h * (d * d + d * self.knots * r + d * r + r * d_model)

    def tp_dimensions(self) -> dict[str, int]:
        """The number of heads, if `tp_mode` shards them."""
        return {"heads": self.heads} if self.tp_mode == "heads" else {}

    def sharded_parameters(self, vocabulary: int, d_model: int) -> int:
        """All but the codebooks, if `tp_mode` shards the heads."""
        if self.tp_mode != "heads":
            return 0
        return self.parameters(vocabulary, d_model) - self.codebook_parameters(vocabulary)
