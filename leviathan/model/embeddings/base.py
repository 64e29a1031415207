"""Interface of the input embeddings: token ids to vectors, and a table on demand."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from leviathan.config.embeddings.base import InputEmbeddingConfig
from leviathan.config.run import ModelConfig, Role
from leviathan.model.tp_layout import NO_TP, TPPlan

Config = TypeVar("Config", bound=InputEmbeddingConfig)
CALIBRATION_IDS = 1024


@dataclass(frozen=True)
class Normal:
    """Initial values of a parameter: N(mean, std²). `std` 0 makes it constant."""

    std: float = 0.0
    mean: float = 0.0


class InputEmbedding(nn.Module, ABC, Generic[Config]):
    """Maps token ids to vectors of width `d_model`.

    Attributes:
        config: configuration of the embedding.
        vocabulary: V, the number of ids with a vector (the padded vocabulary of the model).
        linear_in: names of parameters such that scaling all of them scales E.
    """

    linear_in: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: ModelConfig, config: Config) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = model.padded_vocab_size
        self.tp = NO_TP

    @abstractmethod
    def init_spec(self, model: ModelConfig) -> Mapping[str, Normal]:
        """Initialization of each of the module's own parameters, by local name."""

    @abstractmethod
    def param_roles(self) -> Mapping[str, Role]:
        """Role of each of the module's own parameters, by local name."""

    @torch.no_grad()
    def calibrate(self) -> None:
        """Scales the parameters of `linear_in` such that E has the std `embedding_init_std`.

        Computed over evenly spaced ids in float64 on the CPU, so that the factor, rounded to fp32,
        is identical on all devices. Does nothing if `embedding_init_std` is null or `linear_in` is
        empty.
        """
        std = getattr(self.config, "embedding_init_std", None)
        if std is None or not self.linear_in:
            return
        parameters = {n: p.to("cpu", torch.float64) for n, p in self.named_parameters()}
        step = max(1, self.vocabulary // CALIBRATION_IDS)
        sample = torch.arange(0, self.vocabulary, step).split(64)
        rows = torch.cat([functional_call(self, parameters, (ids,)) for ids in sample])
        for name in self.linear_in:
            self.get_parameter(name).mul_(std / float(rows.std()))

    @abstractmethod
    def vectors(self, ids: Tensor) -> Tensor:
        """Vectors `[N, D]` of the ids `[N]` (int64), each computed independently."""

    def tp_layout(self) -> TPPlan:
        """How tensor parallelism shards the parameters; by default, all are replicated."""
        return {}

    @property
    def output_weight(self) -> nn.Parameter | None:
        """The table `[V, D]` to which an output head is tied; None if it is separate."""
        return None

    def forward(
        self, ids: Tensor, unique_ids: Tensor | None = None, inverse: Tensor | None = None
    ) -> Tensor:
        """Vectors of a batch, computed once per distinct id.

        Args:
            ids: `[B, T]` int64 token ids.
            unique_ids: distinct ids of the batch, `[U]`, if known; repetitions are allowed.
            inverse: `[B, T]` int64 with `unique_ids[inverse] == ids`.

        Returns:
            `[B, T, D]` in the dtype of the parameters.

        Raises:
            IndexError: an id is outside [0, V) (on CUDA a device-side assertion).
        """
        if unique_ids is None or inverse is None:
            distinct, places = torch.unique(ids, return_inverse=True)
        else:
            distinct, places = unique_ids, inverse
        self._check(distinct)
        return F.embedding(places, self.vectors(distinct))

    @torch.no_grad()
    def materialize(self, dtype: torch.dtype | None = None, chunk: int = 1024) -> Tensor:
        """The complete table `[V, D]`, computed `chunk` ids at a time.

        Args:
            dtype: dtype of the result; default: that of the parameters.
            chunk: number of ids computed at once, which bounds the memory of intermediates.
        """
        device = next(chain(self.parameters(), self.buffers())).device
        first = self.vectors(torch.zeros(1, dtype=torch.int64, device=device))
        table = first.new_empty(self.vocabulary, first.shape[1], dtype=dtype)
        for start in range(0, self.vocabulary, chunk):
            stop = min(start + chunk, self.vocabulary)
            table[start:stop] = self.vectors(torch.arange(start, stop, device=device))
        return table

    def _check(self, ids: Tensor) -> None:
        """Raises `IndexError` for ids without a vector; does not synchronize with CUDA."""
        if ids.numel() == 0 or ids.device.type == "meta":
            return
        low, high = ids.aminmax()
        inside = (low >= 0) & (high < self.vocabulary)
        if ids.device.type == "cuda":
            torch.ops.aten._assert_async.msg(inside, "a token id is outside the vocabulary")
        elif not inside:
            raise IndexError(
                f"token ids span [{int(low)}, {int(high)}], outside the vocabulary [0, "
                f"{self.vocabulary}): the data does not match the vocabulary of this model"
            )
