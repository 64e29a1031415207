"""LEV in a transformers Llama: replaces the input table, trains, and materializes for serving.

    .venv/bin/python examples/leviathan_in_llama.py [--steps N]

The text is the source of Python's argparse module, with one token per word or symbol.
"""

import argparse
import inspect
import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leviathan import LeviathanEmbedding

WIDTH, LENGTH, ROWS = 64, 64, 8


def tokens_of(text: str) -> tuple[torch.Tensor, int]:
    """Returns the ids `[N]` of the words and symbols of a text, and the vocabulary size."""
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([number[word] for word in words]), len(number)


def build(vocabulary: int) -> LlamaForCausalLM:
    """A small Llama with a LEV input embedding and an untied dense output head."""
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,  # LEV has no table to tie the head to
        )
    )
    # Smaller than the defaults, which are for a vocabulary of 200,000 ids.
    lev = LeviathanEmbedding(vocabulary, WIDTH, d_seed=32, heads=4, knots=8, rank=16)
    llama.set_input_embeddings(lev)
    return llama


def train(llama: LlamaForCausalLM, ids: torch.Tensor, steps: int) -> list[float]:
    """Trains with AdamW on random windows; returns the loss of each step."""
    optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-3, weight_decay=0)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (ROWS, 1))
        batch = ids[starts + torch.arange(LENGTH)]
        loss = llama(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return losses


def freeze(llama: LlamaForCausalLM) -> None:
    """Replaces LEV by its materialized table; the result is an ordinary Llama."""
    lev = llama.get_input_embeddings()
    assert isinstance(lev, LeviathanEmbedding)
    table = lev.materialize()
    llama.set_input_embeddings(torch.nn.Embedding.from_pretrained(table, freeze=False))


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, materializes and compares the logits; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    ids, vocabulary = tokens_of(inspect.getsource(argparse))
    llama = build(vocabulary)
    losses = train(llama, ids, options.steps)

    sample = ids[None, :LENGTH]
    with torch.no_grad():
        before = llama(sample).logits
        freeze(llama)
        difference = float((llama(sample).logits - before).abs().max())
    print(f"Materializing the table changes the logits by at most {difference:.1e}.")
    return losses


if __name__ == "__main__":
    main()
