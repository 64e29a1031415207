"""The tokenizer files of an imported model, stored in its checkpoint and exported unchanged.

The native tokenizer of the checkpoint gives the same ids for ordinary text, but does not describe
everything that a Hugging Face tokenizer does: special tokens in a text, tokens added around a text,
the chat template. An export must preserve these.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leviathan.data.tokenizer import Tokenizer
from leviathan.evaluate.llama_folder import CONFIG, GENERATION
from leviathan.evaluate.llama_tokenizer import (
    ADDED_TOKENS,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    load_original,
    read_model_json,
)
from leviathan.export.model_card import TokenizerNotes

FOLDER = "imported_tokenizer"  # inside the checkpoint
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    GENERATION,
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a directory
SPECIAL_IDS = "special_ids"  # key of state.json
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ImportedTokenizer:
    """The tokenizer files of an imported model.

    Attributes:
        folder: directory of the files.
        special_ids: bos_token_id, eos_token_id and pad_token_id of the imported config.json.
    """

    folder: Path
    special_ids: Mapping[str, Any]

    def notes(self, tokenizer: Tokenizer) -> TokenizerNotes:
        """Properties for the model card."""
        added = read_model_json(self.folder / TOKENIZER)["added_tokens"]
        names = {token["id"]: token["content"] for token in added}
        prefixed = load_original(self.folder).encode("a").ids[:1] == [tokenizer.prefix_token]
        splits = not read_model_json(self.folder / TOKENIZER_CONFIG).get(
            "split_special_tokens", False
        )
        return TokenizerNotes(
            tokenizer.end_of_text,
            tokenizer.prefix_token,
            names[tokenizer.prefix_token],
            adds_prefix=prefixed,
            imported=True,
            splits_special=splits,
        )

    def copy_to(self, folder: Path) -> None:
        """Copies the files into an export."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)


def keep_tokenizer(source: Path, checkpoint: Path) -> dict[str, Any]:
    """Copies tokenizer files into a checkpoint; returns entries for state.json."""
    kept = checkpoint / FOLDER
    kept.mkdir()
    for name in FILES:
        if (source / name).is_file():
            (kept / name).write_bytes((source / name).read_bytes())
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, kept / TEMPLATES)
    config = read_model_json(source / CONFIG)
    return {SPECIAL_IDS: {key: config[key] for key in _ID_KEYS if key in config}}


def kept_tokenizer(checkpoint: Path, state: Mapping[str, Any]) -> ImportedTokenizer | None:
    """The stored tokenizer files of an imported checkpoint; None for other checkpoints."""
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        return None
    return ImportedTokenizer(folder, state.get(SPECIAL_IDS) or {})
