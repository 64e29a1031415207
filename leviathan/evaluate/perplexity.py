"""Loss of a checkpoint on a split: nats per token, perplexity, bits per byte, by subset."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from leviathan.console import as_text
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import ConfigError
from leviathan.evaluate.scoring import (
    data_identity,
    join_ranks,
    open_checkpoint,
    open_data,
    score_split,
)


def perplexity(
    checkpoint: Path,
    data: Path,
    split: str = "val",
    batch_size: int = 8,
    stride: int | None = None,
) -> dict[str, Any]:
    """Scores every target of a split once and writes the result into the run directory.

    Under a launcher, the ranks share the batches; the result is bitwise that of one rank.

    Bits per byte divides the loss of all targets, end-of-text included, by the bytes of their
    text; end-of-text has none. It is comparable between models with different tokenizers.

    Args:
        checkpoint: path accepted by `resolve_checkpoint`.
        data: a prepared dataset, or one in the `data.format` of the run.
        split: `val` or `train`.
        batch_size: sequences per batch.
        stride: tokens between the starts of two windows, 1 to the context length; by default,
            samples are scored as in training, without preceding text for their first token.

    Returns:
        `nats_per_token`, `perplexity`, `bits_per_byte`, `tokens`, `bytes`, `by_subset` (the
        same keys per subset), and the identity of checkpoint and data.

    Raises:
        CheckpointError: no valid checkpoint was found.
        ConfigError: an invalid stride.
        DataError: the dataset is corrupt, empty, or does not match the model.
    """
    ranks = join_ranks()
    loaded = open_checkpoint(checkpoint, ranks)
    dataset = ranks.on_each_rank(lambda: open_data(loaded, data, split))
    info = dataset.info
    if stride is not None and not 1 <= stride <= info.seq_len:
        raise ConfigError(
            "cli.invalid_option",
            f"--stride {stride}: expected 1 to {info.seq_len} (the context length), "
            f"for example {max(1, info.seq_len // 4)}",
        )
    lengths = np.zeros(info.vocab_size, dtype=np.int64)
    lengths[: loaded.tokenizer.vocab_size] = token_bytes(loaded.tokenizer)
    subsets = len(info.subsets)
    nats, tokens, octets = np.zeros(subsets), np.zeros(subsets), np.zeros(subsets)
    for scored in score_split(loaded, dataset, split, batch_size, "Perplexity", stride):
        nats += np.bincount(scored.subsets, scored.nll, subsets)
        tokens += np.bincount(scored.subsets, minlength=subsets)
        octets += np.bincount(scored.subsets, lengths[scored.targets], subsets)
    by_subset = {
        name: _figures(nats[index], tokens[index], octets[index])
        for index, name in enumerate(info.subsets)
        if tokens[index]
    }
    result = {
        **_figures(nats.sum(), tokens.sum(), octets.sum()),
        "by_subset": by_subset,
        "stride": stride,
        "data": data_identity(info, data, split),
        **loaded.identity,
    }
    # The report reads perplexity.json, which must contain the validation split without a stride.
    name = "perplexity" + ("" if split == "val" else f"_{split}")
    loaded.file(f"{name}.json" if stride is None else f"{name}_stride_{stride}.json", result)
    return result


def perplexity_table(result: dict[str, Any]) -> str:
    """Formats the result as a table: the full split, then its subsets."""
    split, step = result["data"]["split"], result["step"]
    name = Path(result["checkpoint"]).name if step is None else f"Step {step:,}"
    table = Table(title=f"{name} on the {split} split", title_justify="left")
    for head in ("", "nats per token", "perplexity", "bits per byte", "tokens"):
        table.add_column(head, justify="right" if head else "left")
    for name, figures in {"all": result, **result["by_subset"]}.items():
        values = (figures[key] for key in ("nats_per_token", "perplexity", "bits_per_byte"))
        shown = ["–" if value is None else f"{value:,.4f}" for value in values]
        table.add_row(name, *shown, f"{figures['tokens']:,}")
    return as_text(table)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text per token id, [V] int64; 0 for end-of-text and unused ids."""
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for octets, rank in tokenizer.ranks.items():
        lengths[rank] = len(octets)
    return lengths


def _figures(nats: float, tokens: float, octets: float) -> dict[str, float | int | None]:
    per_token = nats / tokens
    return {
        "nats_per_token": float(per_token),
        "perplexity": math.exp(per_token) if per_token < 700 else None,
        "bits_per_byte": float(nats / math.log(2) / octets) if octets else None,
        "tokens": int(tokens),
        "bytes": int(octets),
    }
