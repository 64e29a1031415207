"""Base class of all configuration models, and types of their fields."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

SMALLEST_FLOAT32 = 2.0**-126  # smallest normal number; devices may flush smaller numbers to 0


class Strict(BaseModel):
    """Base class of all configuration models: immutable; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def computed_default(*names: str, compute: Any, default: str, description: str) -> Any:
    """A default computed from earlier fields of the same model; `default` documents it."""
    return Field(
        default_factory=lambda earlier: compute(*(earlier[name] for name in names)),
        description=description,
        json_schema_extra={"default": default},
    )


# Bounds far above any use keep closed forms and buffers from growing without limit.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
Dimension = Annotated[int, Field(gt=0, le=2**24)]
VocabularySize = Annotated[int, Field(gt=0, le=2**31)]
ByteCount = Annotated[int, Field(gt=0, le=2**40)]
PositiveFloat = Annotated[float, Field(gt=0, strict=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=False)]


def _nonzero_in_float32(value: float) -> float:
    if value < SMALLEST_FLOAT32:
        raise ValueError(
            f"found {value:g}, expected at least {SMALLEST_FLOAT32:g}: a smaller value is 0 in "
            "float32 and causes a division by zero"
        )
    return value


# a constant that is added to a denominator or under a square root
Epsilon = Annotated[float, Field(gt=0, strict=False), AfterValidator(_nonzero_in_float32)]
Beta = Annotated[float, Field(ge=0, lt=1, strict=False)]


def _usable_path(value: Any) -> Any:
    if isinstance(value, str) and (not value or "\0" in value):
        raise ValueError(f"found {value!r}, expected a path")
    return value


UserPath = Annotated[Path, Field(strict=False), BeforeValidator(_usable_path)]
# a single path may be written as a string instead of a list
Paths = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
