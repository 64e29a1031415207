"""The model card: what an exported model is, and what is known of how it came about."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leviathan.config.schema import ModelConfig
from leviathan.data.tokenizer import END_OF_TEXT
from leviathan.formatting import format_count
from leviathan.model.model_stats import count_params

MATERIALIZED = (
    " It depends on the id alone, so it was computed once for every id and stands here as an "
    "ordinary, untied table."
)
PAPER = "[arXiv 2601.22040](https://arxiv.org/abs/2601.22040)"
EMBEDDINGS = {
    "tied": "The input embedding is the table of the output head (tied).",
    "untied": "The input embedding is a table of its own (untied).",
    "albert": "In training the input embedding was a narrow table and a linear map (as in ALBERT)."
    + MATERIALIZED,
    "flat_mlp": "In training the input embedding was a narrow table and a two-layer MLP."
    + MATERIALIZED,
    "factored_mlp": "In training the input embedding was generated from the digits of the token id "
    "by codebooks and a two-layer MLP." + MATERIALIZED,
    "binary_codes": "The input embedding is the token id's own bits, without a parameter."
    + MATERIALIZED,
    "leviathan": "In training the input embedding was generated from the digits of the token id "
    f"(LEV of {PAPER})." + MATERIALIZED,
    "leviathan_v1": "In training the input embedding was generated from the digits of the token id "
    f"(the generator of {PAPER}, version 1)." + MATERIALIZED,
}

PREFIX = {
    True: "The tokenizer puts it there by itself, unless `add_special_tokens=False`.",
    False: "The tokenizer adds nothing by itself.",
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

- A pretrained base model: it continues text, it was not tuned to follow instructions, and it says
  what its training text makes likely, whether true or not.
- {documents} scored or generated from its beginning should be preceded by the id {prefix_id},
  once. {prefix}
{specials}
- The context is {seq_len} tokens.
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
    """The text of README.md.

    Args:
        config: of the native model.
        notes: properties of the tokenizer.
        dtype: of the exported weights.
        exported: parameters in the exported folder.
        facts: about the training run, shown in their order.
    """
    counted = count_params(config)
    trained = {
        "Input embedding in training": counted.kind,
        "Parameters in training": counted.total,
        "… of them in the input embedding": counted.input_embedding,
    }
    shape = {
        **({} if notes.imported else trained),
        "Parameters in this folder": exported,
        "Weights": dtype,
        "d_model × layers × heads": f"{config.d_model} × {config.n_layers} × {config.n_heads}",
        "Vocabulary": config.vocab_size,
    }
    documents = IMPORTED_DOCUMENTS if notes.imported else OWN_DOCUMENTS
    example = EXAMPLE_ADDED if notes.adds_prefix else EXAMPLE_WRITTEN
    title = f"Leviathan-{format_count(counted.total)}-{counted.kind}"
    return TEMPLATE.format(
        title=title,
        embedding=EMBEDDINGS[counted.kind],
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
    """Why the two numbers of parameters differ, or that they do not."""
    counted = count_params(config)
    rows, width = config.vocab_size, config.d_model
    padding = config.padded_vocab_size - rows
    said = (
        f"Trained were {counted.total:,} parameters: {counted.input_embedding:,} of the input "
        f"embedding, {counted.output_head:,} of the output head and {counted.body:,} of the body."
    )
    if exported == counted.total:
        return f"{said} This folder holds the same."
    kind = config.embedding.kind
    if kind == "tied":
        said += f" This folder holds {exported:,}"
    else:
        said += (
            f" This folder holds {exported:,}: the input embedding is written out as "
            f"{rows:,} × {width:,} = {rows * width:,} numbers"
        )
    if padding:
        said += f", without the {padding:,} rows that only padded the vocabulary"
    return said + "."


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")
