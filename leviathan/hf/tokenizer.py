"""Conversion of a Hugging Face tokenizer to a tiktoken vocabulary with the same ids.

Every component and field of `tokenizer.json`, and every key of `tokenizer_config.json` that changes
ids, is either reproduced or refused by name. The ids of many texts are then compared with those of
the `tokenizers` library, because equivalent descriptions can still give different ids.

The string of a special token in a text is encoded as ordinary text, as in training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

from leviathan.console import say
from leviathan.data.id_comparison import compare_ids
from leviathan.data.tokenizer import END_OF_TEXT, TOKENIZERS_PATTERNS, Tokenizer, byte_of_character
from leviathan.errors import CheckpointError, DataError
from leviathan.files import read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
MARKER = "export.json"  # written by `leviathan export`
UNUSED = "<|unused_{}|>"  # name of an unused id in an export

_TIKTOKEN_PATTERNS = {theirs: ours for ours, theirs in TOKENIZERS_PATTERNS.items()}
_EXPECTED = (
    "expected pre_tokenizer Sequence[Split(Regex, Isolated), ByteLevel] and no normalizer, as in "
    "Llama 3 and in this project's exports"
)

# Field → the values for which the conversion gives the same ids. The first value is the default
# of a missing field, unless the library has another default.
_SPLIT = {"behavior": ("Isolated",), "invert": (False,)}
_ANY_BOOL = (True, False)
_BYTE_LEVEL = {"add_prefix_space": (False,), "use_regex": (False,), "trim_offsets": _ANY_BOOL}
_BYTE_LEVEL_DEFAULTS = {"use_regex": True}
# Outside of pre-tokenization these fields change neither ids nor text.
_BYTE_LEVEL_ELSEWHERE = dict.fromkeys(_BYTE_LEVEL, _ANY_BOOL)
_BPE = {
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (False, None),
    "fuse_unk": (False, None),
    "ignore_merges": _ANY_BOOL,
}
_TOP_LEVEL = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
}
_ADDED_FIELDS = {"id", "content", "special", "single_word", "lstrip", "rstrip", "normalized"}

# Keys of tokenizer_config.json that can change ids → the values that do not change them.
_CONFIG_KEYS: dict[str, tuple[Any, ...]] = {
    # Other classes change the tokenizer when transformers loads it. transformers 5 writes the
    # second name for the first.
    "tokenizer_class": ("PreTrainedTokenizerFast", "TokenizersBackend"),
    "add_prefix_space": (False, None),
    "do_lower_case": (False, None),
    "from_slow": (False, None),
    "auto_map": (None,),
    "add_eos_token": (False, None),
}
# Keys that do not change the ids of a text without added tokens.
_NEUTRAL_CONFIG_KEYS = {
    "add_bos_token",
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "bos_token",
    "chat_template",
    "clean_up_tokenization_spaces",
    "cls_token",
    "eos_token",
    "errors",
    "extra_special_tokens",
    "is_local",
    "legacy",  # only for SentencePiece tokenizers
    "mask_token",
    "max_length",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "pad_to_multiple_of",
    "pad_token",
    "pad_token_type_id",
    "padding_side",
    "sep_token",
    "special_tokens_map_file",
    "split_special_tokens",
    "stride",
    "tokenizer_file",
    "truncation_side",
    "truncation_strategy",
    "unk_token",
}


@dataclass(frozen=True)
class _Source:
    """The files of a directory that describe its tokenizer."""

    folder: Path
    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    marker: Mapping[str, Any]

    @property
    def added(self) -> dict[str, int]:
        """Content → id of the added tokens; the checks ensure that all of them are special."""
        return {token["content"]: token["id"] for token in self.tokenizer["added_tokens"]}

    def special_token(self, key: str) -> str | None:
        """The content of bos_token or eos_token."""
        return _content(self.config.get(key)) or _content(self.special_tokens_map.get(key))


def read_llama_tokenizer(folder: Path) -> Tokenizer:
    """Converts a byte-level BPE `tokenizer.json` and compares the ids with the original's.

    The end-of-text id is that of the tokenizer's end-of-sequence token. The prefix token is the
    beginning-of-sequence token if there is one, else end-of-text, as in lm-eval's `hf` model.

    Raises:
        CheckpointError: a file is missing or corrupt, a component or field (named in the message)
            cannot be reproduced, or ids differ from those of the `tokenizers` library.
    """
    folder = Path(folder)
    file = folder / TOKENIZER
    source = _Source(
        folder,
        read_model_json(file),
        read_model_json(folder / TOKENIZER_CONFIG),
        _read_optional(folder / SPECIAL_TOKENS_MAP),
        _read_optional(folder / MARKER),
    )
    try:
        problems = [*_tokenizer_problems(source), *_config_problems(source)]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            "import.corrupt", f"{file}: corrupt: {type(error).__name__}: {error}"
        ) from None
    if problems:
        raise CheckpointError(
            "import.unsupported_tokenizer",
            f"{folder}: the tokenizer is not a byte-level BPE that can be read with the same ids: "
            f"{'; '.join(problems)} ({_EXPECTED})",
        )
    tokenizer = _make_tokenizer(source)
    original = load_original(folder)
    if problem := _merge_problem(source, original):
        raise CheckpointError("import.unsupported_tokenizer", f"{file}: {problem}")
    try:
        compare_ids(tokenizer, lambda texts: encode_original(original, texts), file.name)
    except DataError as error:
        raise CheckpointError("import.different_ids", f"{folder}: {error}") from None
    return tokenizer


def load_original(folder: Path) -> Any:
    """The tokenizer of a directory in the `tokenizers` library; encodes special strings as text."""
    from tokenizers import Tokenizer as Original

    try:
        original = Original.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(
            "import.unsupported_tokenizer", f"{folder / TOKENIZER}: cannot be loaded ({error})"
        ) from None
    original.encode_special_tokens = True
    return original


def encode_original(original: Any, texts: list[str]) -> list[list[int]]:
    """The ids of several texts, without added tokens."""
    return [one.ids for one in original.encode_batch_fast(texts, add_special_tokens=False)]


# ---------------------------------------------------------------- tokenizer.json


def _tokenizer_problems(source: _Source) -> Iterator[str]:
    """Components and fields of tokenizer.json that cannot be reproduced."""
    content = source.tokenizer
    for key in sorted(content.keys() - _TOP_LEVEL):
        yield f"{TOKENIZER}: {key}: unknown component"
    for key in ("truncation", "padding", "normalizer"):
        if content.get(key) is not None:
            yield f"{TOKENIZER}: {key} is {_short(content[key])}, expected null"
    yield from _pre_tokenizer_problems(content.get("pre_tokenizer"))
    yield from _model_problems(content["model"])
    yield from _post_processor_problems(content.get("post_processor"), source)
    decoder = content.get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        yield f"{TOKENIZER}: decoder is {_short(decoder or None)}, expected ByteLevel"
    else:
        yield from _field_problems("decoder", decoder, _BYTE_LEVEL_ELSEWHERE)
    for token in content["added_tokens"]:
        name = f"added_tokens[{token['id']}] {token['content']!r}"
        if token.get("special") is not True:
            yield (
                f"{TOKENIZER}: {name}: special is {token.get('special')}: added tokens that are "
                "not special are matched in ordinary text"
            )
        for key in sorted(token.keys() - _ADDED_FIELDS):
            yield f"{TOKENIZER}: {name}: unknown field {key}"


def _pre_tokenizer_problems(component: Any) -> Iterator[str]:
    parts = component
    if isinstance(component, dict):
        parts = [component]
        if component.get("type") == "Sequence":
            parts = component["pretokenizers"]
    kinds = [part["type"] for part in parts or []]
    if kinds != ["Split", "ByteLevel"]:
        found = ", ".join(map(_short, parts or [])) or "null"
        yield f"{TOKENIZER}: pre_tokenizer is {found}, expected Split, ByteLevel"
        return
    split, byte_level = parts
    yield from _field_problems("pre_tokenizer.Split", split, _SPLIT, also={"pattern"})
    if not isinstance(split["pattern"].get("Regex"), str) or len(split["pattern"]) != 1:
        yield f"{TOKENIZER}: pre_tokenizer.Split.pattern is {split['pattern']!r:.60}, not a Regex"
    byte_level = _BYTE_LEVEL_DEFAULTS | byte_level
    yield from _field_problems("pre_tokenizer.ByteLevel", byte_level, _BYTE_LEVEL)


def _model_problems(model: Mapping[str, Any]) -> Iterator[str]:
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        yield f"{TOKENIZER}: model.type is {kind!r}, expected 'BPE'"
        return
    # `_ranks` checks that every byte is in the vocabulary, so unk_token is never used.
    also = {"vocab", "merges", "unk_token"}
    yield from _field_problems("model", model, _BPE, also=also)


def _post_processor_problems(component: Any, source: _Source) -> Iterator[str]:
    """A post-processor may only put the beginning-of-sequence token before the ids."""
    parts = [component] if isinstance(component, dict) else []
    if parts and component.get("type") == "Sequence":
        parts = component["processors"]
    for part in parts:
        kind = part.get("type")
        if kind == "ByteLevel":
            yield from _field_problems("post_processor.ByteLevel", part, _BYTE_LEVEL_ELSEWHERE)
        elif kind == "TemplateProcessing":
            before, after = _template(part["single"])
            bos = source.special_token("bos_token")
            if after or any(token != bos for token in before) or len(before) > 1:
                yield (
                    f"{TOKENIZER}: post_processor.TemplateProcessing.single puts "
                    f"{[*before, '$A', *after]} around a text, expected at most bos_token ({bos!r})"
                )
        else:
            yield f"{TOKENIZER}: post_processor is {_short(part)}"


def _template(single: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The tokens that a template puts before and after a text."""
    names = [part["SpecialToken"]["id"] if "SpecialToken" in part else None for part in single]
    at = names.index(None) if None in names else len(names)
    return [str(name) for name in names[:at]], [str(name) for name in names[at + 1 :]]


def _field_problems(
    where: str,
    component: Mapping[str, Any],
    allowed: Mapping[str, tuple[Any, ...]],
    also: frozenset[str] | set[str] = frozenset(),
) -> Iterator[str]:
    for key, values in allowed.items():
        if component.get(key, values[0]) not in values:
            yield f"{TOKENIZER}: {where}.{key} is {component[key]!r:.40}, expected {values[0]!r}"
    for key in sorted(component.keys() - allowed.keys() - also - {"type"}):
        yield f"{TOKENIZER}: {where}.{key}: unknown field"


def _short(component: Any) -> str:
    """The type of a component, with the types of its parts."""
    if not isinstance(component, dict) or "type" not in component:
        return f"{component!r:.80}"
    inner = next((value for value in component.values() if isinstance(value, list)), [])
    types = [_short(part) for part in inner if isinstance(part, dict) and "type" in part]
    return component["type"] + (f"[{', '.join(types)}]" if types else "")


# ---------------------------------------------------------------- tokenizer_config.json


def _config_problems(source: _Source) -> Iterator[str]:
    """Settings outside tokenizer.json that cannot be reproduced; warns about unknown keys."""
    config, added = source.config, source.added
    for key, allowed in _CONFIG_KEYS.items():
        if config.get(key) not in allowed:
            yield f"{TOKENIZER_CONFIG}: {key} is {config.get(key)!r:.60}, expected {allowed[0]!r}"
    for id, token in (config.get("added_tokens_decoder") or {}).items():
        if added.get(token["content"]) != int(id) or token.get("special") is not True:
            yield (
                f"{TOKENIZER_CONFIG}: added_tokens_decoder[{id}] is {token['content']!r} with "
                f"special={token.get('special')}, but {TOKENIZER} has no such special token"
            )
    for content, id in _read_optional(source.folder / ADDED_TOKENS).items():
        if added.get(content) != id:
            yield f"{ADDED_TOKENS}: {content!r} is {id}, but {TOKENIZER} has no such special token"
    for key in ("bos_token", "eos_token"):
        names = {_content(config.get(key)), _content(source.special_tokens_map.get(key))} - {None}
        if len(names) > 1:
            yield f"{key} differs between {TOKENIZER_CONFIG} and {SPECIAL_TOKENS_MAP}: {names}"
        elif not names and key == "eos_token":
            yield (
                f"{TOKENIZER_CONFIG}: eos_token is missing: set it to the special token of "
                f"{TOKENIZER} that ends a document"
            )
        for name in names - added.keys():
            yield f"{TOKENIZER_CONFIG}: {key} {name!r} is not a special token of {TOKENIZER}"
    if unknown := sorted(config.keys() - _CONFIG_KEYS.keys() - _NEUTRAL_CONFIG_KEYS):
        say(
            f"warning: {source.folder / TOKENIZER_CONFIG}: unknown keys are ignored: "
            f"{', '.join(unknown)} (the ids of many texts are still compared)",
            style="yellow",
        )


def _content(token: Any) -> str | None:
    """The string of a special token, which may be an object with options."""
    return token.get("content") if isinstance(token, dict) else token


# ---------------------------------------------------------------- the vocabulary


def _make_tokenizer(source: _Source) -> Tokenizer:
    added, marker = source.added, source.marker
    eos, bos = source.special_token("eos_token"), source.special_token("bos_token")
    assert eos is not None
    end, prefix = added[eos], added[bos] if bos is not None else None
    special = {name: id for name, id in added.items() if name != UNUSED.format(id)}
    if END_OF_TEXT not in special:
        special[END_OF_TEXT] = special.pop(eos)
    pattern = _pattern(source)
    try:
        encoding = tiktoken.Encoding(
            name=marker.get("tokenizer") or source.folder.name,
            pat_str=_TIKTOKEN_PATTERNS.get(pattern, pattern),
            mergeable_ranks=_ranks(source),
            special_tokens=special,
        )
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            "import.unsupported_tokenizer",
            f"{source.folder / TOKENIZER}: cannot create a tiktoken vocabulary ({error})",
        ) from None
    tokenizer = Tokenizer(encoding, end)
    if prefix is not None:
        tokenizer.prefix_token = prefix
    if isinstance(own := marker.get("end_of_text"), int):
        # In the training data of an export, documents may end with an ordinary id.
        tokenizer.end_of_text = tokenizer.prefix_token = own
    return tokenizer


def _pattern(source: _Source) -> str:
    """The regular expression that splits text into words before merging."""
    return source.tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]


def _ranks(source: _Source) -> dict[bytes, int]:
    """Bytes → id. The file has tokens in GPT-2's printable alphabet."""
    to_byte, added, ranks = byte_of_character(), source.added, {}
    for token, id in source.tokenizer["model"]["vocab"].items():
        if token in added:
            continue
        if unknown := [character for character in token if character not in to_byte]:
            raise CheckpointError(
                "import.unsupported_tokenizer",
                f"{source.folder / TOKENIZER}: model.vocab: {token!r} contains {unknown[0]!r}, "
                "which does not represent a byte: the vocabulary is not byte-level",
            )
        ranks[bytes(to_byte[character] for character in token)] = id
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            "import.unsupported_tokenizer",
            f"{source.folder / TOKENIZER}: model.vocab: {len(missing)} of the 256 single bytes are "
            f"missing, the first {missing[0]:#04x}",
        )
    return ranks


def _merge_problem(source: _Source, original: Any) -> str | None:
    """Where the order of merges differs from tiktoken's (lowest rank first); None if nowhere."""
    model = source.tokenizer["model"]
    vocab, last = model["vocab"], -1
    for number, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        rank = vocab.get(left + right)
        if rank is None:
            return f"model.merges[{number}]: {left + right!r} is not in model.vocab"
        if rank < last:
            return (
                f"model.merges[{number}]: {left + right!r} has the id {rank}, below {last} of an "
                "earlier merge: tiktoken merges in the order of ids, so ids would differ"
            )
        last = rank
    if model.get("ignore_merges"):
        return None  # like tiktoken, uses words of the vocabulary without merging
    added = source.added
    for token, id in vocab.items():
        if token not in added and [part.id for part in original.model.tokenize(token)] != [id]:
            return (
                f"model.merges do not produce {token!r} (id {id}), which tiktoken would use: ids "
                "would differ"
            )
    return None


# ---------------------------------------------------------------- files


def read_model_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file of a model directory.

    Raises:
        CheckpointError: the file is missing, corrupt, or not a JSON object.
    """
    return read_json(file, "import.unreadable", error=CheckpointError)


def _read_optional(file: Path) -> dict[str, Any]:
    return read_model_json(file) if file.is_file() else {}
