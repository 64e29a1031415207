"""The input embeddings as the user writes them, by `kind`, and how large each one is.

Sizes are closed forms of the configuration alone, so they stand here and not with the modules:
a width left out is solved from them when the configuration is read. V is the padded vocabulary,
D the model's width, k digits in base b, d the seed's width.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from leviathan.config.strict import PositiveInt, Strict

Digits = Annotated[int, Field(gt=0, description="k: digits per token id")]
Base = Annotated[int | None, Field(ge=2, description="b; left out: the least b with b^k ≥ V")]
SeedWidth = Annotated[int, Field(gt=0, description="d: width of the codebooks' seed")]
LatentScale = Annotated[Literal["outside", "inside"], Field(description="σ(½·LN(x)) or σ(LN(½·x))")]
SplineInitStd = Annotated[
    float,
    Field(gt=0, strict=False, description="std of the splines' Δ at step 0: how far tokens differ"),
]
InitStd = Annotated[
    float | None,
    Field(gt=0, strict=False, description="std of E at step 0, by scaling; null leaves it"),
]


@dataclass(frozen=True)
class Match:
    """How near its one free width brings an input embedding to a wanted number of parameters.

    Attributes:
        field: the free width's name in the configuration.
        width: its value, whether solved or given.
        parameters: what the input embedding has with it.
        target: what was wanted.
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
    """What all kinds share: a size, and widths that may follow from it."""

    @abstractmethod
    def parameters(self, vocabulary: int, d_model: int) -> int:
        """Number of parameters at V and D, without an output head of the model's own."""

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """A copy with everything filled in that follows from V and D.

        Raises:
            ValueError: a base or target that does not fit V and D.
        """
        return self

    def match(self, vocabulary: int, d_model: int) -> Match | None:
        """How near the size is to the wanted one; None for a kind without a free width."""
        return None

    def cut_by_tp(self) -> dict[str, int]:
        """What parallel.tp cuts into equal parts beside the vocabulary: field → size."""
        return {}


def nearest_width(field: str, count: Callable[[int], int], target: int) -> int:
    """The width at which `count`, affine in it, comes nearest to `target`.

    Raises:
        ValueError: width 1 is already further above the target than width 0 is below it.
    """
    fixed = count(0)
    width = round((target - fixed) / (count(1) - fixed))
    if width < 1:
        raise ValueError(
            f"no {field} comes near {target:,} parameters ({field} 1 has {count(1):,}): "
            f"raise embedding.match_parameters or give embedding.{field}"
        )
    return width


class MatchedConfig(InputEmbeddingConfig):
    """A kind whose one free width is solved so that its size comes nearest to a target."""

    free_width: ClassVar[str]
    match_parameters: int | None = Field(
        default=None,
        gt=0,
        description="size to come near; left out: that of the default LEV at this V and D",
    )

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in `match_parameters`, and the free width where it was left out."""
        target = self.match_parameters or LeviathanConfig().parameters(vocabulary, d_model)
        filled = self.model_copy(update={"match_parameters": target})
        name = self.free_width
        if getattr(filled, name) is not None:
            return filled

        def count(width: int) -> int:
            return filled.model_copy(update={name: width}).parameters(vocabulary, d_model)

        return filled.model_copy(update={name: nearest_width(name, count, target)})

    def match(self, vocabulary: int, d_model: int) -> Match:
        """The width, given or solved, and how far off the target it is."""
        assert self.match_parameters is not None, "not resolved"
        size, target = self.parameters(vocabulary, d_model), self.match_parameters
        width, off = getattr(self, self.free_width), size - target
        return Match(self.free_width, width, size, target, off, round(100 * off / target, 3) + 0.0)


# ---------------------------------------------------------------- tables


class TiedConfig(InputEmbeddingConfig):
    """`V × D` table shared with the output head: the main baseline."""

    kind: Literal["tied"] = "tied"

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D; the output head has none of its own."""
        return vocabulary * d_model


class UntiedConfig(InputEmbeddingConfig):
    """`V × D` table of its own: half as many parameters again at 400M."""

    kind: Literal["untied"] = "untied"

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·D."""
        return vocabulary * d_model


class AlbertConfig(MatchedConfig):
    """`V × E` table, then a linear map to D. Source: ALBERT, arXiv 1909.11942, section 3.1."""

    free_width: ClassVar[str] = "width"
    kind: Literal["albert"] = "albert"
    width: int | None = Field(default=None, gt=0, description="E; left out: solved")
    embedding_init_std: InitStd = 0.02

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """V·E + E·D."""
        assert self.width is not None, "not resolved"
        return self.width * (vocabulary + d_model)


class FlatMLPConfig(MatchedConfig):
    """`V × e` table, then a two-layer SiLU MLP: hidden width H with a bias, no output bias.

    The table gets about half of the target, so that neither half starves; H does the matching.
    """

    free_width: ClassVar[str] = "hidden"
    kind: Literal["flat_mlp"] = "flat_mlp"
    width: int | None = Field(
        default=None, gt=0, description="e; left out: V·e is about half of match_parameters"
    )
    hidden: int | None = Field(default=None, gt=0, description="H; left out: solved")
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
        target = self.match_parameters or LeviathanConfig().parameters(vocabulary, d_model)
        width = max(1, round(target / 2 / vocabulary))
        return self.model_copy(update={"width": width}).resolved(vocabulary, d_model)


class BinaryCodesConfig(InputEmbeddingConfig):
    """No parameters: the id's ⌈log₂V⌉ bits as ±1, tiled to D. Source: arXiv 2605.09751."""

    kind: Literal["binary_codes"] = "binary_codes"
    embedding_init_std: float | None = Field(
        default=0.02, gt=0, strict=False, description="size of each value; null leaves ±1"
    )

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """None."""
        return 0


# ---------------------------------------------------------------- digits and codebooks


class FactoredMLPConfig(MatchedConfig):
    """Digits and codebooks as LEV, then a two-layer SiLU MLP as `flat_mlp`'s."""

    free_width: ClassVar[str] = "hidden"
    kind: Literal["factored_mlp"] = "factored_mlp"
    digits: Digits = 3
    base: Base = None
    d_seed: SeedWidth = 128
    hidden: int | None = Field(default=None, gt=0, description="H; left out: solved")
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
    """What the two versions of the paper share: digits, seed, splines and how they begin."""

    digits: Digits = 3
    base: Base = None
    d_seed: SeedWidth = 128
    rank: PositiveInt = Field(default=64, description="r: rank of each tensor product")
    latent_scale: LatentScale = "outside"
    spline_init_std: SplineInitStd = 0.1
    embedding_init_std: InitStd = 0.02

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in b."""
        return self.model_copy(update={"base": lev_base(self, vocabulary)})


class LeviathanConfig(GeneratorConfig):
    """LEV of arXiv 2601.22040 v2; the defaults give 1,205,376 + 512·D parameters at V = 200,376."""

    kind: Literal["leviathan"] = "leviathan"
    heads: PositiveInt = Field(default=8, description="h: parallel heads summed into E")
    tp: Literal["replicated", "ids", "heads"] = Field(
        default="ids",  # the fastest: see benchmarks/tensor_parallel.py
        description="under parallel.tp: every rank generates all rows, a share of them, or heads",
    )
    knots: int = Field(default=16, ge=2, description="κ: uniform knots of the quadratic B-spline")

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + h·d² + 3·h·d + h·d·κ·r + h·r·D."""
        h, d = self.heads, self.d_seed
        codebooks = self.digits * lev_base(self, vocabulary) * d
        latent = h * d * d + 3 * h * d
        return codebooks + latent + h * d * self.knots * self.rank + h * self.rank * d_model

    def cut_by_tp(self) -> dict[str, int]:
        """The heads, in the mode named after them."""
        return {"heads": self.heads} if self.tp == "heads" else {}


class LeviathanV1Config(GeneratorConfig):
    """The generator of arXiv 2601.22040 v1: one latent for all modes, and a residual from it."""

    kind: Literal["leviathan_v1"] = "leviathan_v1"
    modes: PositiveInt = Field(default=8, description="M: tensor products, concatenated")
    knots: int = Field(default=32, ge=2, description="κ: uniform knots of the quadratic B-spline")

    def parameters(self, vocabulary: int, d_model: int) -> int:
        """k·b·d + d² + 3·d + M·d·κ·r + M·r·D + d·D."""
        m, d = self.modes, self.d_seed
        codebooks = self.digits * lev_base(self, vocabulary) * d
        splines = m * d * self.knots * self.rank
        return codebooks + d * d + 3 * d + splines + (m * self.rank + d) * d_model


DigitConfig = GeneratorConfig | FactoredMLPConfig


def lev_base(config: DigitConfig, vocabulary: int) -> int:
    """The base b of the ids' digits: as configured, else the least with b^k ≥ `vocabulary`.

    Raises:
        ValueError: the configured base is too small for the vocabulary.
    """
    if config.base is not None:
        if config.base**config.digits < vocabulary:
            raise ValueError(
                f"embedding.base {config.base} to the power of {config.digits} digits is "
                f"{config.base**config.digits}, less than the {vocabulary} ids to be told apart"
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
