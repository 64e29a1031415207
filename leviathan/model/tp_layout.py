"""What a module says about tensor parallelism, and what it may ask of its peers.

`tp_layout()` of a module names the sharded parameters and the dimension; the forward pass calls its
`tp`. The model knows no process group: `leviathan.parallel.tensor_parallel` shards
the parameters of a built model and sets each module's `tp`. Until then it is alone, and every
call below gives back what it was given.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A parameter is cut along `dim` into equal consecutive parts, one for each rank."""

    dim: int


@dataclass(frozen=True)
class Partial:
    """A parameter is whole everywhere, but serves each rank for its own share of the work.

    So its gradients on the ranks are summands of the true one. They are added up once a step, by
    whoever steps: see `Layout.settle` in `leviathan.parallel.tensor_parallel`.
    """


# Local parameter name → how the ranks share it. The others are whole everywhere, and so are their
# gradients.
TPPlan = Mapping[str, Shard | Partial]


class TPGroup:
    """The tensor-parallel ranks that hold the other parts of a module; this one is alone.

    Activations between modules are equal on all ranks, and so are their gradients.
    """

    rank = 0
    size = 1

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """`x` itself, along the way to work that is cut: its gradient is summed over the ranks."""
        return x

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """The sum of the ranks' `x`, along the way back from work that is cut."""
        return x

    def gather_from_tp(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' `x`, all of the same shape, one after the other along `dim`."""
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """As `total`, in place and without gradient."""
        return x

    def highest_(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, in place and without gradient."""
        return x


NO_TP = TPGroup()
