"""The model card (README.md) of an exported model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leviathan.config.run import ModelConfig
from leviathan.data.tokenizer import END_OF_TEXT
from leviathan.estimate.params import count_params
from leviathan.formatting import format_count

PREFIX = {
    True: "The tokenizer adds it, unless `add_special_tokens=False`.",
    False: "The tokenizer does not add it.",
}
SPECIAL_TOKENS_TEXT = {
    True: """\
  It encodes the strings of special tokens in a text as special tokens; pass
  `split_special_tokens=True` to encode them as ordinary text.""",
    False: """\
  It encodes the strings of special tokens in a text as ordinary text, as in training; pass
  `split_special_tokens=False` to encode them as special tokens.""",
}
OWN_DOCUMENTS = "Every training document ended with the id {end_of_text}, so a text"
IMPORTED_DOCUMENTS = (
    "The tokenizer is that of the imported model, unchanged. Its documents end with the id "
    "{end_of_text}; a text"
)
EXAMPLE_ADDED = 'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids'
EXAMPLE_WRITTEN = """\
prompt = "{prefix_token}Once upon a time"
ids = tokenizer(prompt, split_special_tokens=False, return_tensors="pt").input_ids"""

TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- llama
- leviathan
---

# {title}

A decoder-only language model in the Llama architecture, exported from a native checkpoint.
{embedding}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
{example}
print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))
```

## Facts

| | |
|---|---|
{facts}

{counts}

## Use

- This is a pretrained base model: it continues text and was not tuned to follow instructions. It
  generates text that is likely given its training data, whether true or not.
- {documents} scored or generated from its beginning should be preceded by the id {prefix_id},
  once. {prefix}
{specials}
- The context length is {seq_len} tokens.
"""


@dataclass(frozen=True)
class TokenizerNotes:
    """Properties of the exported tokenizer for the model card.

    Attributes:
        end_of_text: the id that ends a document.
        prefix_id: the id before a text.
        prefix_token: the string of `prefix_id`.
        adds_prefix: whether the tokenizer adds the prefix itself.
        imported: whether it is the unchanged tokenizer of an imported model.
        splits_special: whether it encodes the strings of special tokens as special tokens.
    """

    end_of_text: int
    prefix_id: int
    prefix_token: str = END_OF_TEXT
    adds_prefix: bool = False
    imported: bool = False
    splits_special: bool = False


def model_card(
    config: ModelConfig,
    notes: TokenizerNotes,
    dtype: str,
    exported: int,
    facts: Mapping[str, Any],
) -> str:
    """Returns the text of README.md.

    Args:
        config: configuration of the native model.
        notes: properties of the tokenizer.
        dtype: data type of the exported weights.
        exported: number of parameters in the exported directory.
        facts: properties of the training run, listed in their order.
    """
    counted = count_params(config)
    trained = {
        "Input embedding in training": counted.kind,
        "Parameters in training": counted.total,
        "… of which in the input embedding": counted.input_embedding,
    }
    shape = {
        **({} if notes.imported else trained),
        "Parameters in this directory": exported,
        "Weights": dtype,
        "d_model × layers × heads": f"{config.d_model} × {config.n_layers} × {config.n_heads}",
        "Vocabulary": config.vocab_size,
    }
    documents = IMPORTED_DOCUMENTS if notes.imported else OWN_DOCUMENTS
    example = EXAMPLE_ADDED if notes.adds_prefix else EXAMPLE_WRITTEN
    title = f"Leviathan-{format_count(counted.total)}-{counted.kind}"
    return TEMPLATE.format(
        title=title,
        embedding=config.embedding.model_card,
        facts="\n".join(f"| {key} | {_show(value)} |" for key, value in {**shape, **facts}.items()),
        counts="" if notes.imported else _counts(config, exported),
        documents=documents.format(end_of_text=notes.end_of_text),
        prefix_id=notes.prefix_id,
        prefix=PREFIX[notes.adds_prefix],
        specials=SPECIAL_TOKENS_TEXT[notes.splits_special],
        example=example.format(prefix_token=notes.prefix_token),
        seq_len=config.seq_len,
    )


def _counts(config: ModelConfig, exported: int) -> str:
    """Explains the difference between the numbers of trained and exported parameters."""
    counted = count_params(config)
    rows, width = config.vocab_size, config.d_model
    padding = config.padded_vocab_size - rows
    text = (
        f"The trained model has {counted.total:,} parameters: {counted.input_embedding:,} in the "
        f"input embedding, {counted.output_head:,} in the output head and "
        f"{counted.body:,} in the body."
    )
    if exported == counted.total:
        return f"{text} This directory contains the same parameters."
    kind = config.embedding.kind
    if kind == "tied":
        text += f" This directory contains {exported:,}"
    else:
        text += (
            f" This directory contains {exported:,}: the input embedding is stored as a table of "
            f"{rows:,} × {width:,} = {rows * width:,} parameters"
        )
    if padding:
        text += f", without the {padding:,} vectors of the vocabulary padding"
    return text + "."


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")
