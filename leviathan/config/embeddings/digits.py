"""Digits and codebooks, the first stage of LEV: k digits in base b, codebook vectors of width d."""

import math
from typing import Annotated

from pydantic import Field

from leviathan.config.base import Dimension
from leviathan.config.embeddings.base import InputEmbeddingConfig

Digits = Annotated[int, Field(gt=0, le=64, description="number of digits per token id (k)")]
Base = Annotated[
    int | None,
    Field(ge=2, le=2**31, description="base of the digits (b); null: the smallest b with b^k ≥ V"),
]
SeedWidth = Annotated[Dimension, Field(description="width of the codebook vectors (d)")]


class DigitConfig(InputEmbeddingConfig):
    """Base class of the kinds that compute the vectors from the digits of the token id."""

    digits: Digits = 3
    base: Base = None
    d_seed: SeedWidth = 128

    def base_at(self, vocabulary: int) -> int:
        """The base b: as configured, or the smallest with b^k ≥ `vocabulary`.

        Raises:
            ValueError: the configured base is too small for the vocabulary.
        """
        if self.base is not None:
            if self.base**self.digits < vocabulary:
                raise ValueError(
                    f"embedding.base {self.base} to the power of {self.digits} digits is "
                    f"{self.base**self.digits}, less than the vocabulary of {vocabulary} ids"
                )
            return self.base
        base = max(2, math.floor(vocabulary ** (1 / self.digits)))
        while base**self.digits < vocabulary:
            base += 1
        return base

    def codebook_parameters(self, vocabulary: int) -> int:
        """k·b·d."""
        return self.digits * self.base_at(vocabulary) * self.d_seed
