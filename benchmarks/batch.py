"""A batch of token ids as in training: 8 samples of 512 tokens of text."""

import io
import json
import os
from itertools import islice
from pathlib import Path

import torch
from harness import shared_data
from torch import Tensor


def text_batch(rows: int = 8, length: int = 512) -> tuple[Tensor, str]:
    """o200k ids `[rows, length]` and their source.

    Real text if the development data is available; otherwise random ids with about as many
    distinct values.
    """
    folder = shared_data()
    if folder is not None:
        return _real(folder, rows * length).view(rows, length), "real text"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(rows * length).exponential_(generator=generator)
    ids = ((drawn * 1.2).exp() * 150 - 150).long() % 200_019
    return ids.view(rows, length), "drawn ids"


def _real(folder: Path, count: int) -> Tensor:
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(folder / "tiktoken_cache"))
    # Not required, and not always installed, if ids are random.
    import zstandard

    from leviathan.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("o200k_base")
    ids: list[int] = []
    with (folder / "corpus" / "val.jsonl.zst").open("rb") as file:
        reader = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8")
        for line in islice(reader, 2000):
            ids += [*tokenizer.encode(json.loads(line)["text"]), tokenizer.end_of_text]
            if len(ids) >= count:
                break
    return torch.tensor(ids[:count])
