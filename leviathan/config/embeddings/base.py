"""Base classes of the embedding configurations.

Parameter counts and FLOPs are closed forms of the configuration. A width that is not set is derived
from a target count when the configuration is read. V is the padded vocabulary size, D the model
width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from leviathan.config.base import Strict

PAPER = "[arXiv 2601.22040](https://arxiv.org/abs/2601.22040)"
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
        width: value of the free width, derived or set.
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
    """Base class of the kinds.

    Attributes:
        kind: name of the kind, a literal in each subclass.
        model_card: sentence on the embedding for the model card of an export.
    """

    model_card: ClassVar[str]
    kind: Any

    @abstractmethod
    def parameters(self, vocabulary: int, d_model: int) -> int:
        """Parameter count at V and D, without a separate output head."""

    def multiply_adds(self, d_model: int) -> int:
        """Multiply-adds of the forward pass per id; 0 for a look-up."""
        return 0

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """A copy with all values that follow from V and D.

        Raises:
            ValueError: a base or target that does not fit V and D.
        """
        return self

    def match(self, vocabulary: int, d_model: int) -> Match | None:
        """How closely the parameter count matches its target; None without a free width."""
        return None

    def tp_dimensions(self) -> dict[str, int]:
        """Dimensions besides the vocabulary that parallel.tp must divide: field → size."""
        return {}

    def sharded_parameters(self, vocabulary: int, d_model: int) -> int:
        """Number of parameters that tensor parallelism shards; the others are replicated."""
        return 0


class MatchedConfig(InputEmbeddingConfig):
    """A kind with one free width, derived such that the parameter count matches a target."""

    free_width: ClassVar[str]
    target_params: int | None = Field(
        default=None,
        gt=0,
        le=10**13,
        description="target number of parameters; null: that of the default LEV at this V and D",
    )

    @property
    def free(self) -> int:
        """Value of the free width; it must be set or resolved."""
        value = getattr(self, self.free_width)
        assert value is not None, "not resolved"
        return value

    def target(self, vocabulary: int, d_model: int) -> int:
        """The target parameter count: as configured, or that of the default LEV."""
        from leviathan.config.embeddings.leviathan import LeviathanConfig

        return self.target_params or LeviathanConfig().parameters(vocabulary, d_model)

    def resolved(self, vocabulary: int, d_model: int) -> Self:
        """Fills in `target_params`, and the free width if it is not set."""
        target, name = self.target(vocabulary, d_model), self.free_width
        filled = self.model_copy(update={"target_params": target})
        if getattr(filled, name) is not None:
            return filled

        def count(width: int) -> int:
            return filled.model_copy(update={name: width}).parameters(vocabulary, d_model)

        return filled.model_copy(update={name: nearest_width(name, count, target)})

    def match(self, vocabulary: int, d_model: int) -> Match:
        """The width, set or derived, and its deviation from the target."""
        size, target = self.parameters(vocabulary, d_model), self.target(vocabulary, d_model)
        off = size - target
        return Match(
            self.free_width, self.free, size, target, off, round(100 * off / target, 3) + 0.0
        )


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


def function_of_id(how: str) -> str:
    """Sentences of the model card on an embedding that is exported as a table."""
    return (
        f"In training the input embedding was {how}. It is a function of the token id and is "
        "stored here as an ordinary, untied table."
    )
