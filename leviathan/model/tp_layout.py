"""Interface of a module to tensor parallelism: its sharded parameters and its collectives.

`tp_layout()` of a module names the sharded parameters and their dimension; its forward pass calls
`tp`. The model has no process group: `leviathan.parallel.tensor_parallel` shards the parameters of
a built model and sets `tp` of each module. The default `tp` has one rank, for which every call
returns its argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A parameter is sharded along `dim` into equal consecutive parts, one per rank."""

    dim: int


@dataclass(frozen=True)
class Partial:
    """A parameter is replicated, but each rank uses it for its own share of the work.

    Its gradients on the ranks are therefore partial sums. They are summed once per step by the
    engine: see `Layout.sync_replicated_grads` in `leviathan.parallel.tensor_parallel`.
    """


# Local parameter name → how it is sharded. All others are replicated, with equal gradients on
# all ranks.
TPPlan = Mapping[str, Shard | Partial]


class TPGroup:
    """The tensor-parallel ranks of a module; the default has one rank.

    Activations between modules are equal on all ranks, and so are their gradients.
    """

    rank = 0
    size = 1

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Returns `x` as input of sharded work; its gradient is summed over the ranks."""
        return x

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks, as output of sharded work."""
        return x

    def gather_from_tp(self, x: Tensor, dim: int) -> Tensor:
        """Concatenation of the `x` of all ranks, of equal shapes, along `dim`."""
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """Like `total`, in place and without gradient."""
        return x

    def highest_(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, in place and without gradient."""
        return x


NO_TP = TPGroup()
