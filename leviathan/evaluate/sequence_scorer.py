"""Log-likelihoods and greedy continuations of token sequences of any length, in batches."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from leviathan.console import progress_bar
from leviathan.errors import DataError
from leviathan.evaluate.ranks import Ranks
from leviathan.model.decode import OnToken, generate, with_materialized_embedding
from leviathan.model.head import TokenScores
from leviathan.model.transformer import IGNORE, CausalLM

Pair = tuple[list[int], list[int]]  # (context ids, ids to score)


class SequenceScorer:
    """Scores (context, continuation) pairs in batches of `batch_size` sequences.

    Sequences are padded on the right, so with a causal model no score depends on the batch. If they
    do not fit the context, they are truncated from the left and counted in `truncated`. Ranks share
    the batches.
    """

    def __init__(
        self, model: CausalLM, padding: int, batch_size: int, ranks: Ranks | None = None
    ) -> None:
        self.model = with_materialized_embedding(model.eval())  # one lookup per token
        self.padding = padding
        self.batch_size = batch_size
        self.ranks = ranks or Ranks()
        self.max_length = model.config.seq_len
        self.device = next(model.parameters()).device
        self.truncated = 0

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation in nats, whether it is the greedy one), in order.

        Raises:
            DataError: a continuation is longer than the model's context.
        """
        rows = [self._row(*pair) for pair in pairs]
        # Long sequences first, so that a batch that exceeds the memory fails immediately. Sequences
        # of similar length share a batch, which reduces padding.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        size = self.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        with progress_bar("Log-likelihoods", total=len(rows)) as bar:

            def score_batch(batch: list[int]) -> list[tuple[float, bool]]:
                scores = list(self._score_batch([rows[index] for index in batch]))
                bar.advance(len(batch) * self.ranks.world_size)
                return scores

            scored = self.ranks.map(score_batch, batches)
        results = dict(zip(order, chain.from_iterable(scored), strict=True))
        return [results[index] for index in range(len(rows))]

    def overflow(self, context: Sequence[int], continuation: Sequence[int]) -> int:
        """Number of ids to remove from a context so that it fits together with its continuation."""
        return max(0, len(context) + len(continuation) - (self.max_length + 1))

    def generate(
        self, contexts: Sequence[list[int]], new_tokens: int, end: int, on_token: OnToken
    ) -> None:
        """Greedy continuations, one batch; see `leviathan.model.decode.generate`."""
        generate(self.model, contexts, new_tokens, end, on_token)

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Ids of one sequence, and the number of scored ids at its end."""
        if len(continuation) > self.max_length:
            raise DataError(
                "tasks.too_long",
                f"a continuation of {len(continuation):,} tokens does not fit the model's context "
                f"of {self.max_length:,}; this task needs a model with a longer context",
            )
        ids = context + continuation
        self.truncated += self.overflow(context, continuation) > 0
        return ids[-(self.max_length + 1) :], len(continuation)

    def _score_batch(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        length = max(len(ids) for ids, _ in rows) - 1
        inputs = torch.full((len(rows), length), self.padding)  # [B, T]
        targets = torch.full((len(rows), length), IGNORE)
        for number, (ids, scored) in enumerate(rows):
            row, end = torch.tensor(ids), len(ids) - 1
            inputs[number, :end] = row[:-1]
            targets[number, end - scored : end] = row[len(ids) - scored :]
        scores = self._scores(inputs.to(self.device), targets.to(self.device))
        total = -scores.nll.double().sum(1)  # [B]
        greedy = scores.is_greedy.sum(1).cpu() == (targets != IGNORE).sum(1)
        return zip(total.tolist(), greedy.tolist(), strict=True)

    @torch.no_grad()
    def _scores(self, inputs: Tensor, targets: Tensor) -> TokenScores:
        """Like `score` of the model, but computes logits only for scored positions."""
        counts = targets != IGNORE
        hidden = self.model.hidden(inputs)[counts].unsqueeze(0)  # [1, N, D]
        found = self.model.lm_head(hidden, targets[counts].unsqueeze(0), "scores")
        nll = torch.zeros(targets.shape, dtype=found.nll.dtype, device=targets.device)
        greedy = torch.zeros_like(counts)
        nll[counts], greedy[counts] = found.nll[0], found.is_greedy[0]
        return TokenScores(nll, greedy)
