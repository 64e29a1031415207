"""Tokenizers: any tiktoken vocabulary, and byte-level BPE trained on your own text.

Both are a `Tokenizer`: tiktoken merges, tiktoken ids, one end-of-text id. A trained vocabulary is
stored in tiktoken's rank format, so that every tool that reads that format can use it.

A `.tiktoken` file contains only ranks. If the ranks are those of an encoding that tiktoken
publishes, its pattern and special tokens are known offline. For any other file, a `.meta.json`
file must state them.
"""

import binascii
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from leviathan.config.explain import did_you_mean
from leviathan.console import progress_bar, say
from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.errors import DataError
from leviathan.files import check_writable_file, read_json, write_atomic

END_OF_TEXT = "<|endoftext|>"

R50K_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
# Vocabularies that `leviathan tokenizer train` writes use this pattern too.
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Our pattern → the equivalent pattern for the `tokenizers` library, where the two differ: in
# Oniguruma's Ruby syntax, `{1,3}+` is a repetition, not a possessive quantifier.
TOKENIZERS_PATTERNS = {CL100K_PATTERN: CL100K_PATTERN.replace("{1,3}+", "{1,3}")}


@dataclass(frozen=True)
class PublishedEncoding:
    """One of tiktoken's encodings.

    Attributes:
        name: the name in tiktoken.
        pattern: the regular expression that splits text into words.
        special_tokens: name → id.
        ranks_sha256: SHA-256 of the ranks in tiktoken's file format.
    """

    name: str
    pattern: str
    special_tokens: dict[str, int] = field(hash=False)
    ranks_sha256: str


# Other names share these ranks: gpt2 is r50k_base; p50k_edit and o200k_harmony have more special
# tokens than p50k_base and o200k_base, with the same ids for ordinary text and end-of-text.
PUBLISHED = (
    PublishedEncoding(
        "r50k_base",
        R50K_PATTERN,
        {END_OF_TEXT: 50256},
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    ),
    PublishedEncoding(
        "p50k_base",
        R50K_PATTERN,
        {END_OF_TEXT: 50256},
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    ),
    PublishedEncoding(
        "cl100k_base",
        CL100K_PATTERN,
        {
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    PublishedEncoding(
        "o200k_base",
        O200K_PATTERN,
        {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
)
PATTERNS = {encoding.name: encoding.pattern for encoding in PUBLISHED}


def published_encoding(rank_file: bytes) -> PublishedEncoding | None:
    """The published encoding with these ranks (in tiktoken's file format), or None."""
    digest = hashlib.sha256(rank_file).hexdigest()
    return next((known for known in PUBLISHED if known.ranks_sha256 == digest), None)


RANKS_FILE = "tokenizer.tiktoken"
META_FILE = "tokenizer.meta.json"
META_SUFFIX = ".meta.json"  # next to a .tiktoken file of another name
_META_KEYS = ("name", "pattern", "special_tokens")
_OPTIONAL_META_KEYS = ("fingerprint", "end_of_text")
_BAD_LINES_NAMED = 3


class UnencodableText(DataError):
    """A text that tiktoken cannot encode."""


class Tokenizer:
    """A tiktoken encoding with one end-of-text id.

    Attributes:
        name: name of the encoding, or of its file.
        vocab_size: the highest id plus one (o200k_base: 200,019).
        end_of_text: the id that ends every document; `encode` never returns it.
        prefix_token: the id before a text that is scored or continued from its beginning; on
            our datasets, this is `end_of_text`.
    """

    def __init__(self, encoding: tiktoken.Encoding, end_of_text: int | None = None) -> None:
        self._encoding = encoding
        self.name = encoding.name
        self.pattern: str = encoding._pat_str
        self.ranks: dict[bytes, int] = encoding._mergeable_ranks
        self.special_tokens: dict[str, int] = dict(encoding._special_tokens)
        if END_OF_TEXT not in self.special_tokens:
            raise DataError(
                "tokenizer.no_end_of_text", f"tokenizer {self.name} has no {END_OF_TEXT} token"
            )
        self.end_of_text = self.special_tokens[END_OF_TEXT] if end_of_text is None else end_of_text
        self.vocab_size: int = encoding.n_vocab
        self._prefix_token: int | None = None

    @property
    def prefix_token(self) -> int:
        """See the class; `end_of_text` by default."""
        return self.end_of_text if self._prefix_token is None else self._prefix_token

    @prefix_token.setter
    def prefix_token(self, id: int) -> None:
        self._prefix_token = id

    @cached_property
    def rank_file(self) -> bytes:
        """The vocabulary in tiktoken's rank format."""
        return _dump_ranks(self.ranks)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over ranks, pattern and special tokens; equal values imply equal ids."""
        return _fingerprint(self.rank_file, self.pattern, self.special_tokens)

    def encode(self, text: str) -> list[int]:
        """Encodes a text; a literal `<|endoftext|>` in it is encoded as ordinary text.

        Raises:
            UnencodableText: tiktoken fails, as it does on about a million consecutive blanks.
        """
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """Like `encode`; uint32 [ids]."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            raise UnencodableText(
                "record.unencodable", f"tiktoken cannot encode this text: {error}"
            ) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        return self._encoding.decode([int(id) for id in ids])

    def decode_bytes(self, id: int) -> bytes:
        """Returns the bytes of one id; empty for an unused id.

        A model may have more logits than its tokenizer has ids, and can generate any of them.
        """
        try:
            return self._encoding.decode_single_token_bytes(id)
        except KeyError:
            return b""

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.tiktoken` (ranks) and `tokenizer.meta.json` into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.save_as(directory / RANKS_FILE)

    def save_as(self, path: Path) -> None:
        """Writes the ranks to `path` and the description to the `.meta.json` file next to it."""
        meta = {
            "name": self.name,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "fingerprint": self.fingerprint,
        }
        if self.end_of_text != self.special_tokens[END_OF_TEXT]:
            meta["end_of_text"] = self.end_of_text
        write_atomic(path, self.rank_file)
        write_atomic(meta_file_of(path), (json.dumps(meta, indent=2) + "\n").encode())


def meta_file_of(path: Path) -> Path:
    """The description file of the ranks in `path`: `bpe.tiktoken` → `bpe.meta.json`."""
    return path.with_suffix(META_SUFFIX)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Loads a tiktoken name, a `FILE.tiktoken`, or a directory written by `Tokenizer.save`.

    A rank file does not contain its pattern and special tokens. They are read from the `.meta.json`
    file next to it. Without that file, the ranks must be those of a published tiktoken encoding.

    Raises:
        DataError: the tokenizer is missing or corrupt, a rank file has no description, or tiktoken
            cannot find or download the encoding.
    """
    path = Path(spec)
    if path.is_dir():
        return _load_file(path / RANKS_FILE)
    if path.suffix == ".tiktoken" or path.is_file():
        return _load_file(path)
    name = str(spec)
    known = tiktoken.list_encoding_names()
    if name not in known:
        hint = did_you_mean(name, known, f"tiktoken has {', '.join(known)}")
        raise DataError(
            "tokenizer.not_found",
            f"tokenizer {name!r} is not a tiktoken encoding, a .tiktoken file or a directory with "
            f"{RANKS_FILE}; "
            f"{hint}",
        )
    try:
        return Tokenizer(tiktoken.get_encoding(name))
    except (
        OSError,
        ValueError,
    ) as error:  # errors of requests are OSErrors; a wrong hash is a ValueError
        raise DataError(
            "tokenizer.not_loaded",
            f"tiktoken could not load {name}: {error}. Without a network, set "
            "TIKTOKEN_CACHE_DIR to a directory with its cached file.",
        ) from None


def _load_file(path: Path) -> Tokenizer:
    ranks, meta_path = _load_ranks(path), meta_file_of(path)
    if not meta_path.is_file():
        return _load_published(path, ranks, meta_path)
    meta = _read_meta(meta_path)
    found = _fingerprint(_dump_ranks(ranks), meta["pattern"], meta["special_tokens"])
    if meta.get("fingerprint", found) != found:
        raise DataError(
            "tokenizer.mismatch",
            f"{path} is not the vocabulary that {meta_path} describes (fingerprint)",
        )
    return _make(ranks, meta, meta_path)


def _fingerprint(rank_file: bytes, pattern: str, special_tokens: dict[str, int]) -> str:
    digest = hashlib.sha256(rank_file)
    digest.update(json.dumps([pattern, special_tokens], sort_keys=True).encode())
    return digest.hexdigest()


def _load_published(path: Path, ranks: dict[bytes, int], meta_path: Path) -> Tokenizer:
    """The published encoding of a rank file without a description."""
    known = published_encoding(_dump_ranks(ranks))
    if known is None:
        names = ", ".join(encoding.name for encoding in PUBLISHED)
        example = {
            "name": path.stem,
            "pattern": "o200k_base",
            "special_tokens": {END_OF_TEXT: max(ranks.values()) + 1},
        }
        raise DataError(
            "tokenizer.no_description",
            f"{path}: a rank file does not contain its split pattern and special tokens, "
            f"{meta_path} does not exist, and the ranks do not match any published tiktoken "
            f"encoding ({names}). Write {meta_path}, a JSON object with the keys `name`, `pattern` "
            "(the regular expression, or the name of a tiktoken encoding with the same pattern) "
            f"and `special_tokens` (name → id, including {END_OF_TEXT}). For a file of an "
            f"earlier `leviathan tokenizer train`: {json.dumps(example)}",
        )
    return _make(ranks, {**vars(known), "special_tokens": dict(known.special_tokens)}, path)


def _read_meta(path: Path) -> dict[str, Any]:
    """Reads and validates a `.meta.json` file; expands names of patterns."""
    meta = read_json(path, "tokenizer.corrupt")
    for key in _META_KEYS:
        if key not in meta:
            raise DataError(
                "tokenizer.corrupt",
                f"{path}: corrupt tokenizer description: the key {key!r} is missing",
            )
    for key in meta.keys() - {*_META_KEYS, *_OPTIONAL_META_KEYS}:
        raise DataError(
            "tokenizer.unknown_key",
            f"{path}: unknown key {key!r}: expected {', '.join(_META_KEYS)} and, optionally, "
            f"{', '.join(_OPTIONAL_META_KEYS)}",
        )
    special, end = meta["special_tokens"], meta.get("end_of_text", 0)
    ids = [*special.values(), end] if isinstance(special, dict) else []
    if not ids or any(type(id) is not int or not 0 <= id < 1 << 32 for id in ids):
        raise DataError(
            "tokenizer.corrupt",
            f"{path}: special_tokens must map names to ids, and end_of_text must be an id; "
            f"found {special!r:.80}, {end!r:.20}",
        )
    if not (isinstance(meta["name"], str) and isinstance(meta["pattern"], str)):
        raise DataError("tokenizer.corrupt", f"{path}: name and pattern must be strings")
    return meta | {"pattern": PATTERNS.get(meta["pattern"], meta["pattern"])}


def _make(ranks: dict[bytes, int], meta: dict[str, Any], path: Path) -> Tokenizer:
    """Creates the tokenizer described by `meta`, which was read from `path`."""
    taken = set(ranks.values())
    for name, id in meta["special_tokens"].items():
        if id in taken:
            raise DataError(
                "tokenizer.duplicate_id",
                f"{path}: special_tokens: the id {id} of {name!r} is already used",
            )
        taken.add(id)
    try:
        encoding = tiktoken.Encoding(
            name=meta["name"],
            pat_str=meta["pattern"],
            mergeable_ranks=ranks,
            special_tokens=meta["special_tokens"],
        )
    except (ValueError, KeyError) as error:  # an invalid expression, or one id for two tokens
        raise DataError(
            "tokenizer.invalid", f"{path}: cannot create the tokenizer ({error})"
        ) from None
    tokenizer = Tokenizer(encoding, meta.get("end_of_text"))
    if tokenizer.end_of_text >= tokenizer.vocab_size:
        raise DataError(
            "tokenizer.corrupt",
            f"{path}: end_of_text is {tokenizer.end_of_text:,}, but the tokenizer has only "
            f"{tokenizer.vocab_size:,} ids",
        )
    if "fingerprint" not in meta:
        _check_pattern(tokenizer, path)
    return tokenizer


def _check_pattern(tokenizer: Tokenizer, path: Path) -> None:
    """Refuses a pattern that does not match all of a text: tiktoken silently drops the rest."""
    for text in FIXED_TEXTS:
        try:
            matched = tokenizer.decode(tokenizer.encode(text)) == text
        except BaseException as error:  # a Rust panic (as on an empty match) is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            matched = False
        if not matched:
            raise DataError(
                "tokenizer.loses_text",
                f"{path}: the pattern does not match every character of {text[:40]!r}, so ids "
                "would lose text; use the pattern of the original tokenizer",
            )


def _load_ranks(path: Path) -> dict[bytes, int]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            "tokenizer.unreadable", f"tokenizer file {path}: {error.strerror}"
        ) from None
    fields = content.split()
    try:
        tokens = [binascii.a2b_base64(token, strict_mode=True) for token in fields[::2]]
        ranks = dict(zip(tokens, map(int, fields[1::2]), strict=True))
    except (ValueError, binascii.Error):
        raise _bad_rank_line(path, content) from None
    if len(set(ranks.values())) != content.count(b"\n") + (content[-1:] not in (b"", b"\n")):
        raise DataError("tokenizer.duplicate_id", f"{path}: a token or rank occurs twice")
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(
            "tokenizer.missing_bytes",
            f"{path}: {missing} of the 256 single bytes are missing (truncated file?)",
        )
    return ranks


def _bad_rank_line(path: Path, content: bytes) -> DataError:
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            binascii.a2b_base64(token, strict_mode=True)
            int(rank)
        except (ValueError, binascii.Error):
            return DataError(
                "tokenizer.corrupt",
                f"{path}:{number}: expected a base64 token and its rank, found {line[:40]!r}",
            )
    return DataError(
        "tokenizer.corrupt", f"{path}: expected one base64 token and its rank per line"
    )


def _dump_ranks(ranks: dict[bytes, int]) -> bytes:
    encode = binascii.b2a_base64
    ordered = sorted(ranks.items(), key=itemgetter(1))
    return b"".join([b"%b %d\n" % (encode(token, newline=False), rank) for token, rank in ordered])


# ---------------------------------------------------------------- training


def train_bpe(files: Sequence[str | Path], vocab_size: int, out: Path) -> dict[str, Any]:
    """Trains byte-level BPE on the texts of `files` and writes tiktoken's rank format to `out`.

    The file has exactly `vocab_size` entries, the 256 single bytes first. The `.meta.json` file
    next to it contains the pattern and the end-of-text id, which is `vocab_size`. The result
    depends only on the texts. Bad lines are skipped with a warning.

    Returns:
        `{"out", "meta", "entries", "vocab_size", "documents", "bytes_of_text", "fingerprint"}`.

    Raises:
        DataError: `out` cannot be written, there is no text, or too little text for `vocab_size`
            entries.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as HfTokenizer

    if vocab_size <= 256:
        raise DataError(
            "tokenizer.vocab_too_small",
            f"vocab_size must be greater than 256, the number of single bytes; found {vocab_size}",
        )
    check_writable_file(out)
    check_writable_file(meta_file_of(out))
    tally = {"documents": 0, "bytes_of_text": 0}
    bpe = HfTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    bpe.train_from_iterator(_texts([str(file) for file in files], tally), trainer)

    to_byte = byte_of_character()
    tokens = [
        bytes(to_byte[character] for character in token)
        for token, _ in sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    ]
    single = [bytes([byte]) for byte in range(256)]
    tokens = single + [token for token in tokens if len(token) > 1]
    if len(tokens) != vocab_size:
        raise DataError(
            "tokenizer.too_little_text",
            f"{tally['bytes_of_text']:,} bytes of text give only {len(tokens):,} vocabulary "
            f"entries, {vocab_size:,} were requested. Use more text or a smaller --vocab-size",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    encoding = tiktoken.Encoding(
        name=out.stem,
        pat_str=O200K_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={END_OF_TEXT: vocab_size},
    )
    trained = Tokenizer(encoding)
    trained.save_as(out)
    return {
        "out": str(out),
        "meta": str(meta_file_of(out)),
        "entries": len(tokens),
        "vocab_size": trained.vocab_size,
        **tally,
        "fingerprint": trained.fingerprint,
    }


def _texts(files: Sequence[str], tally: dict[str, int]) -> Iterator[str]:
    """Yields the texts of `files` and counts them in `tally`."""
    from leviathan.data.prepare.readers import read
    from leviathan.data.prepare.records import Document
    from leviathan.data.prepare.sources import find_inputs

    inputs, rejected_records = find_inputs(files), 0
    with progress_bar(
        "tokenizer: reading", total=sum(source.size() or 0 for source in inputs) or None
    ) as bar:
        for source in inputs:
            for item in read(source, on_bytes=bar.advance):
                if not isinstance(item, Document):
                    # There is no `on_error` here; preparing the same files has one.
                    rejected_records += 1
                    if rejected_records <= _BAD_LINES_NAMED:
                        say(f"warning: omitted {item.message(source)}", style="yellow")
                    continue
                tally["documents"] += 1
                tally["bytes_of_text"] += len(item.text.encode())
                yield item.text
    if rejected_records > _BAD_LINES_NAMED:
        say(f"warning: omitted {rejected_records:,} invalid lines in total", style="yellow")
    if not tally["bytes_of_text"]:
        raise DataError(
            "tokenizer.too_little_text", f"no documents with text in {', '.join(files)}"
        )


def byte_of_character() -> dict[str, int]:
    """The byte behind each character of GPT-2's printable alphabet, which `tokenizers` uses."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
