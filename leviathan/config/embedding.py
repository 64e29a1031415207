"""The configurations of the input embeddings by `kind`, and their parameter counts.

Parameter counts are closed forms of the configuration. A width that is not set is derived from a
target count when the configuration is read. V is the padded vocabulary size, D the model width, k
the number of digits in base b, d the width of the codebook vectors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from leviathan.config.base import PositiveInt, Strict

Digits = Annotated[int, Field(gt=0, description="number of digits per token id (k)")]
Base = Annotated[
    int | None, Field(ge=2, description="base of the digits (b); null: the smallest b with b^k ≥ V")
]
SeedWidth = Annotated[int, Field(gt=0, description="width of the codebook vectors (d)")]
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
InitStd = Annotated[
    float | None,
    Field(
        gt=0,
        strict=False,
        description="standard deviation to which the initial vectors are scaled; null: not scaled",
    ),
]


@dataclass(frozen=True)
class Match:
    """How closely the free width of an input embedding matches a target parameter count.

    Attributes:
        field: name of the free width in the configuration.
        width: value of the free width, solved or set.
        parameters: resulting parameter count.
        target: target parameter count.
        off: `parameters - target`.
        off_percent: the same in percent of the target.
    """

    field: str
    width: int
    parameters: int
    target: int
    off: int
    off_percent: float


class InputEmbeddingConfig(Strict, ABC):
    """Base class of the kinds."""

    @abstractmethod
    def parameters(self, vocabulary: int, d_model: int) -> int:
        """Parameter count at V and D, without a separate output head."""

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """A copy with everything filled in that follows from V and D.

        Raises:
            ValueError: a base or target that does not fit V and D.
        """
        return self

    def match(self, vocabulary: int, d_model: int) -> Match | None:
        """How closely the parameter count matches its target; None for a kind without a free
        width."""
        return None

    def cut_by_tp(self) -> dict[str, int]:
        """Dimensions besides the vocabulary that parallel.tp must divide: field → size."""
        return {}


def nearest_width(field: str, count: Callable[[int], int], target: int) -> int:
    """The width at which `count`, affine in the width, is nearest to `target`.

    Raises:
        ValueError: the count at width 1 is farther above the target than that at width 0 is below.
    """
    fixed = count(0)
    width = round((target - fixed) / (count(1) - fixed))
    if width < 1:
        raise ValueError(
            f"no embedding.{field} gives {target:,} parameters: {field}=1 gives {count(1):,}; "
            f"increase embedding.target_params or set embedding.{field}"
        )
    return width


class MatchedConfig(InputEmbeddingConfig):
    """A kind with one free width, which is derived such that the parameter count matches a
    target."""

    free_width: ClassVar[str]
    target_params: int | None = Field(
        default=None,
        gt=0,
        description="target number of parameters; null: that of the default LEV at this V and D",
    )

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in `target_params`, and the free width if it is not set."""
        target = self.target_params or LeviathanConfig().parameters(vocabulary, d_model)
        filled = self.model_copy(update={"target_params": target})
        name = self.free_width
        if getattr(filled, name) is not None:
            return filled

        def count(width: int) -> int:
            return filled.model_copy(update={name: width}).parameters(vocabulary, d_model)

        return filled.model_copy(update={name: nearest_width(name, count, target)})

    def match(self, vocabulary: int, d_model: int) -> Match:
        """The width, set or solved, and its deviation from the target."""
        assert self.target_params is not None, "not resolved"
        size, target = self.parameters(vocabulary, d_model), self.target_params
        width, off = getattr(self, self.free_width), size - target
        return Match(self.free_width, width, size, target, off, round(100 * off / target, 3) + 0.0)


# ---------------------------------------------------------------- tables


class TiedConfig(InputEmbeddingConfig):
    """`V × D` table shared with the output head: the main baseline."""

    kind: Literal["tied"] = "tied"

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D; the output head shares them."""
        return vocabulary * d_model


class UntiedConfig(InputEmbeddingConfig):
    """Separate `V × D` table: 50 % more parameters at 400M."""

    kind: Literal["untied"] = "untied"

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D."""
        return vocabulary * d_model


class AlbertConfig(MatchedConfig):
    """`V × E` table, then a linear map to D. Source: ALBERT, arXiv 1909.11942, section 3.1."""

    free_width: ClassVar[str] = "width"
    kind: Literal["albert"] = "albert"
    width: int | None = Field(
        default=None, gt=0, description="table width (E); null: derived from target_params"
    )
    embedding_init_std: InitStd = 0.02

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·E + E·D."""
        assert self.width is not None, "not resolved"
        return self.width * (vocabulary + d_model)


class FlatMLPConfig(MatchedConfig):
    """`V × e` table, then a two-layer SiLU MLP: hidden width H with a bias, no output bias.

    The table gets about half of the target; H is derived from the rest.
    """

    free_width: ClassVar[str] = "hidden"
    kind: Literal["flat_mlp"] = "flat_mlp"
    width: int | None = Field(
        default=None, gt=0, description="table width (e); null: V·e is about half of target_params"
    )
    hidden: int | None = Field(
        default=None, gt=0, description="hidden width (H); null: derived from target_params"
    )
    embedding_init_std: InitStd = 0.02

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·e + H·(e + 1 + D)."""
        assert self.width is not None, "not resolved"
        assert self.hidden is not None, "not resolved"
        return vocabulary * self.width + self.hidden * (self.width + 1 + d_model)

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in e, then H."""
        if self.width is not None:
            return super().resolved(vocabulary, d_model)
        target = self.target_params or LeviathanConfig().parameters(vocabulary, d_model)
        width = max(1, round(target / 2 / vocabulary))
        return self.model_copy(update={"width": width}).resolved(vocabulary, d_model)


class BinaryCodesConfig(InputEmbeddingConfig):
    """No parameters: the id's ⌈log₂V⌉ bits as ±1, tiled to D. Source: arXiv 2605.09751."""

    kind: Literal["binary_codes"] = "binary_codes"
    embedding_init_std: float | None = Field(
        default=0.02, gt=0, strict=False, description="absolute value of the entries; null: 1"
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """No parameters."""
        return 0


# ---------------------------------------------------------------- digits and codebooks


class FactoredMLPConfig(MatchedConfig):
    """Digits and codebooks of LEV, then a two-layer SiLU MLP as in `flat_mlp`."""

    free_width: ClassVar[str] = "hidden"
    kind: Literal["factored_mlp"] = "factored_mlp"
    digits: Digits = 3
    base: Base = None
    d_seed: SeedWidth = 128
    hidden: int | None = Field(
        default=None, gt=0, description="hidden width (H); null: derived from target_params"
    )
    embedding_init_std: InitStd = 0.02

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + H·(d + 1 + D)."""
        assert self.hidden is not None, "not resolved"
        codebooks = self.digits * lev_base(self, vocabulary) * self.d_seed
        return codebooks + self.hidden * (self.d_seed + 1 + d_model)

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in b, then H."""
        base = lev_base(self, vocabulary)
        if self.base is not None:
            return super().resolved(vocabulary, d_model)
        return self.model_copy(update={"base": base}).resolved(vocabulary, d_model)


class GeneratorConfig(InputEmbeddingConfig):
    """Settings of both versions of the paper: digits, codebooks, splines, initialization."""

    digits: Digits = 3
    base: Base = None
    d_seed: SeedWidth = 128
    rank: PositiveInt = Field(default=64, description="rank of each tensor product (r)")
    latent_scale: LatentScale = "outside"
    spline_init_std: SplineInitStd = 0.1
    embedding_init_std: InitStd = 0.02

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in b."""
        return self.model_copy(update={"base": lev_base(self, vocabulary)})


class LeviathanConfig(GeneratorConfig):
    """LEV of arXiv 2601.22040 v2; the defaults give 1,205,376 + 512·D parameters at V = 200,376."""

    kind: Literal["leviathan"] = "leviathan"
    heads: PositiveInt = Field(default=8, description="number of heads, which are summed (h)")
    tp_mode: Literal["replicated", "ids", "heads"] = Field(
        default="ids",  # the fastest: see benchmarks/tensor_parallel.py
        description="tensor parallelism of LEV: replicated, or divided by ids or by heads",
    )
    knots: int = Field(
        default=16, ge=2, description="number of uniform knots of the quadratic B-splines (κ)"
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + h·d² + 3·h·d + h·d·κ·r + h·r·D."""
        h, d = self.heads, self.d_seed
        codebooks = self.digits * lev_base(self, vocabulary) * d
        latent = h * d * d + 3 * h * d
        return codebooks + latent + h * d * self.knots * self.rank + h * self.rank * d_model

    def cut_by_tp(self) -> dict[str, int]:
        """The number of heads, if `tp_mode` shards them."""
        return {"heads": self.heads} if self.tp_mode == "heads" else {}


class LeviathanV1Config(GeneratorConfig):
    """The generator of arXiv 2601.22040 v1: one latent for all modes, and a residual."""

    kind: Literal["leviathan_v1"] = "leviathan_v1"
    modes: PositiveInt = Field(default=8, description="number of concatenated tensor products (M)")
    knots: int = Field(
        default=32, ge=2, description="number of uniform knots of the quadratic B-splines (κ)"
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + d² + 3·d + M·d·κ·r + M·r·D + d·D."""
        m, d = self.modes, self.d_seed
        codebooks = self.digits * lev_base(self, vocabulary) * d
        splines = m * d * self.knots * self.rank
        return codebooks + d * d + 3 * d + splines + (m * self.rank + d) * d_model


DigitConfig = GeneratorConfig | FactoredMLPConfig


def lev_base(config: DigitConfig, vocabulary: int) -> int:
    """The base b of the ids' digits: as configured, or the smallest with b^k ≥ `vocabulary`.

    Raises:
        ValueError: the configured base is too small for the vocabulary.
    """
    if config.base is not None:
        if config.base**config.digits < vocabulary:
            raise ValueError(
                f"embedding.base {config.base} to the power of {config.digits} digits is "
                f"{config.base**config.digits}, less than the vocabulary of {vocabulary} ids"
            )
        return config.base
    base = max(2, math.floor(vocabulary ** (1 / config.digits)))
    while base**config.digits < vocabulary:
        base += 1
    return base


EmbeddingConfig = Annotated[
    TiedConfig
    | UntiedConfig
    | AlbertConfig
    | FlatMLPConfig
    | FactoredMLPConfig
    | BinaryCodesConfig
    | LeviathanConfig
    | LeviathanV1Config,
    Field(discriminator="kind"),
]
