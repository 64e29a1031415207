"""Log-likelihoods and greedy continuations of token rows of any length, in batches."""

from collections.abc import Iterator, Sequence

import torch

from leviathan.console import progress_bar
from leviathan.errors import DataError
from leviathan.model.transformer import IGNORE, CausalLM

Pair = tuple[list[int], list[int]]  # (context ids, ids to score)


class RowScorer:
    """Scores (context, continuation) pairs with a model, `batch_size` rows at once.

    Rows are padded on the right, where a causal model cannot look, so no score depends on the
    batch. What does not fit the model is cut from the left and counted in `truncated`.
    """

    def __init__(self, model: CausalLM, padding: int, batch_size: int) -> None:
        self.model = model.eval()
        self.padding = padding
        self.batch_size = batch_size
        self.max_length = model.config.seq_len
        self.device = next(model.parameters()).device
        self.truncated = 0

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation in nats, whether it is the greedy one), in order.

        Raises:
            DataError: a continuation is longer than the model's context.
        """
        rows = [self._row(*pair) for pair in pairs]
        # Long rows first: a batch too large for the memory fails at once; and rows of like length
        # share a batch, so that little of it is padding.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        results: dict[int, tuple[float, bool]] = {}
        with progress_bar("Log-likelihoods", total=len(rows)) as bar:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                scores = self._score_batch([rows[index] for index in batch])
                results |= zip(batch, scores, strict=True)
                bar.advance(len(batch))
        return [results[index] for index in range(len(rows))]

    def generate(self, context: list[int], new_tokens: int) -> Iterator[int]:
        """Greedy ids after a context, at most `new_tokens`, one by one; the context is not kept."""
        room = max(1, self.max_length - new_tokens)
        self.truncated += len(context) > room
        ids = context[-room:]
        for _ in range(new_tokens):
            window = torch.tensor([ids[-self.max_length :]], device=self.device)
            ids.append(int(self.model.logits(window)[0, -1].argmax()))
            yield ids[-1]

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Ids of one row, and how many at its end are scored."""
        if len(continuation) > self.max_length:
            raise DataError(
                f"a continuation of {len(continuation):,} tokens does not fit the model's context "
                f"of {self.max_length:,}; this task needs a model with a longer context"
            )
        ids = context + continuation
        self.truncated += len(ids) > self.max_length + 1
        return ids[-(self.max_length + 1) :], len(continuation)

    def _score_batch(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        length = max(len(ids) for ids, _ in rows) - 1
        inputs = torch.full((len(rows), length), self.padding)  # [B, T]
        targets = torch.full((len(rows), length), IGNORE)
        for number, (ids, scored) in enumerate(rows):
            row, end = torch.tensor(ids), len(ids) - 1
            inputs[number, :end] = row[:-1]
            targets[number, end - scored : end] = row[len(ids) - scored :]
        scores = self.model.score(inputs.to(self.device), targets.to(self.device))
        total = -scores.nll.double().sum(1)  # [B]
        greedy = scores.is_greedy.sum(1).cpu() == (targets != IGNORE).sum(1)
        return zip(total.tolist(), greedy.tolist(), strict=True)
