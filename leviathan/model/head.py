"""The output head: vocabulary logits, and a cross-entropy that computes them in chunks."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leviathan.config.run import ModelConfig, Role
from leviathan.model import CHUNK_LOGITS
from leviathan.model.tp_layout import NO_TP, Shard, TPGroup, TPPlan

IGNORE = -100  # target that is excluded from the loss
CACHED_ROWS = 16  # logits per pass on the CPU: 13 MB at 200k ids

Output = Literal["loss", "scores", "logits"]


class TokenScores(NamedTuple):
    """Loss of each target, and whether greedy decoding predicts it."""

    nll: Tensor  # [B, T] fp32 nats; 0 where the target is ignored
    is_greedy: Tensor  # [B, T] bool; False where the target is ignored


class LMHead(nn.Module):
    """A dense classifier `[padded V, D]` without bias, separate or tied to the input table.

    A tied head references the parameter of the embedding, so that engines that gather parameters
    per module (ZeRO-3) find it here as well. In state dicts it belongs to the embedding.

    Args:
        config: configuration of the model.
        tied_to: table of the embedding, or None for a separate weight.
        z_loss: weight of (log Σ exp logits)², added per target to the training loss. At 0, it is
            not computed. Source: arXiv 2204.02311, section 5.
    """

    def __init__(
        self, config: ModelConfig, tied_to: nn.Parameter | None, z_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.z_loss = z_loss
        self.vocab_size = config.vocab_size
        self.tied = tied_to is not None
        self.tp = NO_TP
        shape = (config.padded_vocab_size, config.d_model)
        self.weight = nn.Parameter(torch.empty(shape)) if tied_to is None else tied_to

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, output: Output = "loss"
    ) -> Tensor | TokenScores:
        """All uses of the weight are in `forward`, so that module hooks apply to each of them.

        Args:
            hidden: `[B, T, D]`.
            targets: `[B, T]` int64, `IGNORE` for excluded positions; not required for "logits".
            output: "loss": fp32 scalar, the sum of the NLL of the targets in nats (in training
                including the z-loss); "scores": `TokenScores`; "logits": `[B, T, padded V]` fp32,
                -inf for padding ids.
        """
        if output == "logits":
            return self._logits(hidden)
        assert targets is not None, "targets are required to compute a loss"
        flat, ids = hidden.flatten(0, -2), targets.flatten()
        if output == "loss" and torch.is_grad_enabled():
            part = self._part()
            return _SummedCrossEntropy.apply(
                part.peers.copy_to_tp(flat), self.weight, ids, part, self.z_loss
            )
        scores = self._scores(flat, ids)
        if output == "loss":
            return scores.nll.sum()
        return TokenScores(*(x.view_as(targets) for x in scores))

    def param_roles(self) -> Mapping[str, Role]:
        """Name → role. A tied head has no parameter; the embedding declares the weight."""
        return {} if self.tied else {"weight": "head"}

    def tp_layout(self) -> TPPlan:
        """Each rank has the weights of some of the ids."""
        return {"weight": Shard(0)}

    def _part(self) -> "_Part":
        first = self.tp.rank * len(self.weight)
        real = min(max(self.vocab_size - first, 0), len(self.weight))
        return _Part(first, real, self.tp)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.tp.gather_from_tp(_masked_logits(hidden, self.weight, self._part().real), -1)

    @torch.no_grad()
    def _scores(self, hidden: Tensor, targets: Tensor) -> TokenScores:
        nll, greedy = [], []
        vocabulary = self._part()
        for part in _chunks(targets.numel(), self.weight.shape[0]):
            logits, ids = _masked_logits(hidden[part], self.weight, vocabulary.real), targets[part]
            greedy.append(_likeliest(logits, vocabulary) == ids)
            sums = _exponentiate(logits, ids, vocabulary)
            cost = (sums.log_norm - sums.target_logit).squeeze(1)
            nll.append(cost.where(ids != IGNORE, 0).float())
        return TokenScores(torch.cat(nll), torch.cat(greedy))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.tied:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if not self.tied:
            super()._load_from_state_dict(*args, **kwargs)


class _Part(NamedTuple):
    """Ids whose logits a rank computes: from `first`; those after the first `real` are padding."""

    first: int
    real: int
    peers: TPGroup


def _masked_logits(hidden: Tensor, weight: Tensor, real: int) -> Tensor:
    """Logits in fp32 or wider; padding ids after `real` have probability 0."""
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if real < weight.shape[0]:
        logits[..., real:] = float("-inf")
    return logits


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


class _SummedCrossEntropy(torch.autograd.Function):
    """Sum of the NLL over the targets; its gradient is computed per chunk in the forward pass.

    This takes three products of `tokens × V × D` instead of four with recomputation, and at most
    `CHUNK_LOGITS` logits exist at once. Both gradient products are in the dtype of the weight. With
    `z_loss` > 0, z_loss · (log Σ exp logits)² is added for every target.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: _Part,
        z_loss: float = 0.0,
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        buffer = None
        for part in _chunks(targets.numel(), weight.shape[0]):
            # One buffer for all chunks: new memory for each would cost as much as a pass over it.
            buffer = torch.mm(hidden[part], weight.T, out=_first_rows(buffer, part))
            slope, summand = _softmax_slope(buffer.to(wide), targets[part], vocabulary, z_loss)
            loss += summand
            slope = slope.to(weight.dtype)
            grad_hidden[part] = slope @ weight
            if wide == weight.dtype:
                torch.addmm(grad_weight, slope.T, hidden[part], out=grad_weight)
            else:
                grad_weight += slope.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_loss = grad_loss.to(grad_hidden.dtype)
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None


def _first_rows(buffer: Tensor | None, part: slice) -> Tensor | None:
    return None if buffer is None else buffer[: part.stop - part.start]


def _softmax_slope(
    logits: Tensor, targets: Tensor, vocabulary: _Part, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Replaces logits `[n, V]` by the gradient of the loss in place; also returns the summed loss.

    On the CPU, a few rows at a time, which stay in the cache between passes.
    """
    cached = logits.device.type == "cpu" and vocabulary.peers.size == 1
    rows = CACHED_ROWS if cached else len(logits)
    loss = logits.new_zeros(())
    for part, ids in zip(logits.split(rows), targets.split(rows), strict=True):
        part[:, vocabulary.real :] = float("-inf")
        counts = (ids != IGNORE).to(part.dtype).unsqueeze(1)
        sums = _exponentiate(part, ids, vocabulary)
        loss += ((sums.log_norm - sums.target_logit) * counts).sum()
        scale = counts / sums.total
        if z_loss > 0:
            loss += z_loss * (sums.log_norm.square() * counts).sum()
            scale = scale * (1 + 2 * z_loss * sums.log_norm)
        part.mul_(scale).scatter_add_(1, sums.places, -sums.mine.to(part.dtype))
    return logits, loss


class _Sums(NamedTuple):
    """Statistics of rows of logits over the complete vocabulary, `[n, 1]` each."""

    total: Tensor  # Σ exp(logit - maximum)
    log_norm: Tensor  # log Σ exp(logit)
    target_logit: Tensor  # logit of the target
    mine: Tensor  # bool: whether the target is among the ids of this rank …
    places: Tensor  # … and its column; else 0


def _exponentiate(logits: Tensor, targets: Tensor, vocabulary: _Part) -> _Sums:
    """Replaces logits `[n, V]` by exp(logit - maximum of the row) in place."""
    peers = vocabulary.peers
    places = (targets - vocabulary.first).unsqueeze(1)
    mine = (places >= 0) & (places < logits.shape[1])
    places = places.where(mine, 0)
    target_logit = peers.sum_(logits.gather(1, places).where(mine, 0))
    highest = peers.highest_(logits.amax(1, keepdim=True))
    total = peers.sum_(logits.sub_(highest).exp_().sum(1, keepdim=True))
    return _Sums(total, total.log() + highest, target_logit, mine, places)


def _likeliest(logits: Tensor, vocabulary: _Part) -> Tensor:
    """Id `[n]` of the maximum logit of each row; the lowest id of equal logits."""
    best, column = logits.max(1)
    ids = column + vocabulary.first
    highest = vocabulary.peers.highest_(best.clone())
    beyond = torch.iinfo(
        ids.dtype
    ).max  # greater than every id, for ranks that do not have the maximum
    return -vocabulary.peers.highest_(-ids.where(best == highest, beyond))
