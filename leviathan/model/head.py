"""The output head: vocabulary logits, and the cross-entropy that never holds all of them."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leviathan.config.optim import Role
from leviathan.config.schema import ModelConfig
from leviathan.model.tp_layout import NO_TP, Shard, TPGroup, TPPlan

IGNORE = -100  # a target that is not scored
CHUNK_LOGITS = 2**26  # logits at a time: 256 MiB of fp32
CACHED_ROWS = 16  # of logits in a pass on the CPU: 13 MB at 200k

Output = Literal["loss", "scores", "logits"]


class TokenScores(NamedTuple):
    """What each target cost, and whether it was the likeliest token."""

    nll: Tensor  # [B, T] fp32 nats; 0 where the target is ignored
    is_greedy: Tensor  # [B, T] bool; False where the target is ignored


class LMHead(nn.Module):
    """A dense `[padded V, D]` classifier without bias, its own or tied to the input table.

    A tied head holds the very parameter of the embedding, so that engines which gather parameters
    module by module (ZeRO-3) find it here as well. The embedding owns it in state dicts.

    Args:
        config: the model's.
        tied_to: the embedding's table, or None for a weight of its own.
        z_loss: weight of (log Σ exp logits)², added per target to the training loss. At 0 nothing
            of it is computed. Source: arXiv 2204.02311, section 5.
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
        """Everything goes through here, so that module hooks see every use of the weight.

        Args:
            hidden: `[B, T, D]`.
            targets: `[B, T]` int64, `IGNORE` where not scored; not needed for "logits".
            output: "loss": fp32 scalar, the sum of the targets' NLL in nats (in training with
                the z-loss, if any); "scores": `TokenScores`; "logits": `[B, T, padded V]` fp32,
                -inf in the padding.
        """
        if output == "logits":
            return self._logits(hidden)
        assert targets is not None, "a loss needs targets"
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
        """Name → role. A tied head has no own parameter; the embedding declares the weight."""
        return {} if self.tied else {"weight": "head"}

    def tp_layout(self) -> TPPlan:
        """Each rank has some of the ids."""
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
            cost = (sums.log_norm - sums.wanted).squeeze(1)
            nll.append(cost.where(ids != IGNORE, 0).float())
        return TokenScores(torch.cat(nll), torch.cat(greedy))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.tied:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if not self.tied:
            super()._load_from_state_dict(*args, **kwargs)


class _Part(NamedTuple):
    """The ids that a rank has logits of: `first` and on; those after `real` of them are padding."""

    first: int
    real: int
    peers: TPGroup


def _masked_logits(hidden: Tensor, weight: Tensor, real: int) -> Tensor:
    """Logits in fp32 or wider; the padding rows after `real` get no probability."""
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
    """Σ NLL over the targets that count, its gradient formed chunk by chunk in the forward pass.

    Three products of `tokens × V × D` instead of the four that recomputation would take, and never
    more than `CHUNK_LOGITS` logits at a time. Both gradient products are in the weight's dtype.
    With `z_loss` > 0, z_loss · (log Σ exp logits)² is added for every target that counts.
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
            # One buffer for all chunks: fresh pages for each would cost as much as a pass over it.
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
    """Turns logits `[n, V]` in place into the loss's slope by them; also the summed loss.

    On the CPU a few rows at a time, which stay in its cache from one pass to the next.
    """
    cached = logits.device.type == "cpu" and vocabulary.peers.size == 1
    rows = CACHED_ROWS if cached else len(logits)
    loss = logits.new_zeros(())
    for part, ids in zip(logits.split(rows), targets.split(rows), strict=True):
        part[:, vocabulary.real :] = float("-inf")
        counts = (ids != IGNORE).to(part.dtype).unsqueeze(1)
        sums = _exponentiate(part, ids, vocabulary)
        loss += ((sums.log_norm - sums.wanted) * counts).sum()
        scale = counts / sums.total
        if z_loss > 0:
            loss += z_loss * (sums.log_norm.square() * counts).sum()
            scale = scale * (1 + 2 * z_loss * sums.log_norm)
        part.mul_(scale).scatter_add_(1, sums.places, -sums.mine.to(part.dtype))
    return logits, loss


class _Sums(NamedTuple):
    """Of rows of logits over the whole vocabulary, `[n, 1]` each."""

    total: Tensor  # Σ exp(logit - highest)
    log_norm: Tensor  # log Σ exp(logit)
    wanted: Tensor  # the target's logit
    mine: Tensor  # bool: the target's logit is in this rank's part …
    places: Tensor  # … in this column; else 0


def _exponentiate(logits: Tensor, targets: Tensor, vocabulary: _Part) -> _Sums:
    """Turns logits `[n, V]` in place into exp(logit - the row's highest)."""
    peers = vocabulary.peers
    places = (targets - vocabulary.first).unsqueeze(1)
    mine = (places >= 0) & (places < logits.shape[1])
    places = places.where(mine, 0)
    wanted = peers.sum_(logits.gather(1, places).where(mine, 0))
    highest = peers.highest_(logits.amax(1, keepdim=True))
    total = peers.sum_(logits.sub_(highest).exp_().sum(1, keepdim=True))
    return _Sums(total, total.log() + highest, wanted, mine, places)


def _likeliest(logits: Tensor, vocabulary: _Part) -> Tensor:
    """The id `[n]` of each row's highest logit, the lowest of several."""
    best, column = logits.max(1)
    ids = column + vocabulary.first
    highest = vocabulary.peers.highest_(best.clone())
    beyond = torch.iinfo(ids.dtype).max  # of ids on a rank whose best is not the best
    return -vocabulary.peers.highest_(-ids.where(best == highest, beyond))
