"""Tokenizers: any tiktoken vocabulary, and byte-level BPE trained on one's own text.

Both end up as the same `Tokenizer`: tiktoken merges, tiktoken ids, one end-of-text id. A trained
vocabulary is stored in tiktoken's rank format, so every tool that reads that format can use it.
"""

import binascii
import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from leviathan.console import progress_bar, say
from leviathan.data.files import check_file, write_atomic
from leviathan.errors import DataError

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = "tokenizer.tiktoken"
META_FILE = "tokenizer.meta.json"
_BAD_LINES_NAMED = 3

# How o200k_base cuts text into words before merging; trained vocabularies use the same cut.
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


class UnencodableText(DataError):
    """A text that tiktoken cannot cut into words."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"tiktoken cannot encode this text: {reason}")


class Tokenizer:
    """A tiktoken encoding with one end-of-text id.

    Attributes:
        name: what the user called it.
        vocab_size: number of ids, that is the highest id plus one (o200k_base: 200,019).
        end_of_text: the id that ends every document (and nothing else: see `encode`).
    """

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self.name = encoding.name
        self.pattern: str = encoding._pat_str
        self.ranks: dict[bytes, int] = encoding._mergeable_ranks
        self.special_tokens: dict[str, int] = dict(encoding._special_tokens)
        if END_OF_TEXT not in self.special_tokens:
            raise DataError(f"tokenizer {self.name} has no {END_OF_TEXT} token")
        self.end_of_text = self.special_tokens[END_OF_TEXT]
        self.vocab_size: int = encoding.n_vocab

    @cached_property
    def rank_file(self) -> bytes:
        """The vocabulary in tiktoken's rank format."""
        return _dump_ranks(self.ranks)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over ranks, pattern and special tokens: equal means the same ids for any text."""
        digest = hashlib.sha256(self.rank_file)
        digest.update(json.dumps([self.pattern, self.special_tokens], sort_keys=True).encode())
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ordinary encoding: a literal `<|endoftext|>` in `text` stays text, never the special id.

        Raises:
            UnencodableText: tiktoken gave up (it does on about a million blanks in a row).
        """
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """As `encode`; uint32 [ids]."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            raise UnencodableText(str(error)) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        return self._encoding.decode([int(id) for id in ids])

    def decode_bytes(self, id: int) -> bytes:
        """The bytes that one id stands for."""
        return self._encoding.decode_single_token_bytes(id)

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.tiktoken` (ranks) and `tokenizer.meta.json` into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        meta = {
            "name": self.name,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "fingerprint": self.fingerprint,
        }
        write_atomic(directory / RANKS_FILE, self.rank_file)
        write_atomic(directory / META_FILE, (json.dumps(meta, indent=2) + "\n").encode())


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Loads a tiktoken name, a `FILE.tiktoken` of ranks, or a folder written by `Tokenizer.save`.

    A bare file of N ranks gets o200k's pattern and the end-of-text id N.

    Raises:
        DataError: no such tokenizer, damaged, or tiktoken can neither find nor fetch it.
    """
    path = Path(spec)
    if path.is_dir():
        return _load_file(path / RANKS_FILE, path / META_FILE)
    if path.suffix == ".tiktoken" or path.is_file():
        return _load_file(path, path.with_suffix(".meta.json"))
    name = str(spec)
    known = tiktoken.list_encoding_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"tiktoken knows {', '.join(known)}"
        raise DataError(
            f"tokenizer {name!r} is no tiktoken name, .tiktoken file or folder with {RANKS_FILE}; "
            f"{hint}"
        )
    try:
        return Tokenizer(tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a bad hash a ValueError
        raise DataError(
            f"tiktoken could not load {name}: {error}. Without a network, point TIKTOKEN_CACHE_DIR "
            "at a folder that holds its cached file."
        ) from None


def _load_file(path: Path, meta_path: Path) -> Tokenizer:
    ranks = _load_ranks(path)
    meta: dict[str, Any] = {}
    if meta_path.is_file():
        try:
            meta = json.loads(meta_path.read_bytes())
            meta = {key: meta[key] for key in ("name", "pattern", "special_tokens", "fingerprint")}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{meta_path}: damaged tokenizer description ({error!r})") from None
    size = max(ranks.values()) + 1
    tokenizer = Tokenizer(
        tiktoken.Encoding(
            name=meta.get("name", path.stem),
            pat_str=meta.get("pattern", O200K_PATTERN),
            mergeable_ranks=ranks,
            special_tokens=meta.get("special_tokens", {END_OF_TEXT: size}),
        )
    )
    if meta and tokenizer.fingerprint != meta["fingerprint"]:
        raise DataError(f"{path} is not the vocabulary that {meta_path} describes (fingerprint)")
    return tokenizer


def _load_ranks(path: Path) -> dict[bytes, int]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer file {path}: {error.strerror}") from None
    fields = content.split()
    try:
        tokens = [binascii.a2b_base64(token, strict_mode=True) for token in fields[::2]]
        ranks = dict(zip(tokens, map(int, fields[1::2]), strict=True))
    except (ValueError, binascii.Error):
        raise _bad_rank_line(path, content) from None
    if len(set(ranks.values())) != content.count(b"\n") + (content[-1:] not in (b"", b"\n")):
        raise DataError(f"{path}: the same token or rank stands there twice")
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(f"{path}: {missing} of the 256 single bytes are missing (truncated file?)")
    return ranks


def _bad_rank_line(path: Path, content: bytes) -> DataError:
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            binascii.a2b_base64(token, strict_mode=True)
            int(rank)
        except (ValueError, binascii.Error):
            return DataError(
                f"{path}:{number}: expected a base64 token and its rank, found {line[:40]!r}"
            )
    return DataError(f"{path}: not one base64 token and its rank a line")


def _dump_ranks(ranks: dict[bytes, int]) -> bytes:
    encode = binascii.b2a_base64
    ordered = sorted(ranks.items(), key=itemgetter(1))
    return b"".join([b"%b %d\n" % (encode(token, newline=False), rank) for token, rank in ordered])


# ---------------------------------------------------------------- training


def train_bpe(files: Sequence[str | Path], vocab_size: int, out: Path) -> dict[str, Any]:
    """Trains byte-level BPE on the texts of `files` and writes tiktoken's rank format to `out`.

    The file has exactly `vocab_size` entries, the 256 single bytes first; loading it adds the
    end-of-text id `vocab_size`. The same texts give the same file. Bad lines are left out, with a
    warning.

    Returns:
        `{"out", "entries", "vocab_size", "documents", "bytes_of_text", "fingerprint"}`.

    Raises:
        DataError: `out` cannot be written, nothing to read, or too little text for so many
            entries.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as HfTokenizer

    if vocab_size <= 256:
        raise DataError(f"vocab_size must be above the 256 single bytes, found {vocab_size}")
    check_file(out)
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

    to_byte = _byte_of_character()
    tokens = [
        bytes(to_byte[character] for character in token)
        for token, _ in sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    ]
    single = [bytes([byte]) for byte in range(256)]
    tokens = single + [token for token in tokens if len(token) > 1]
    if len(tokens) != vocab_size:
        raise DataError(
            f"{tally['bytes_of_text']:,} bytes of text give only {len(tokens):,} vocabulary "
            f"entries, {vocab_size:,} were asked for: use more text or a smaller --vocab-size"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, _dump_ranks({token: rank for rank, token in enumerate(tokens)}))
    trained = load_tokenizer(out)
    return {
        "out": str(out),
        "entries": len(tokens),
        "vocab_size": trained.vocab_size,
        **tally,
        "fingerprint": trained.fingerprint,
    }


def _texts(files: Sequence[str], tally: dict[str, int]) -> Iterator[str]:
    """The texts of `files`, counted into `tally`."""
    from leviathan.data.prepare.reader import Document, read
    from leviathan.data.prepare.sources import find_inputs

    inputs, bad_lines = find_inputs(files), 0
    with progress_bar(
        "tokenizer: reading", total=sum(source.size() or 0 for source in inputs) or None
    ) as bar:
        for source in inputs:
            for item in read(source, on_bytes=bar.advance):
                if not isinstance(item, Document):
                    # Statistics need no policy; preparing the same files will have one.
                    bad_lines += 1
                    if bad_lines <= _BAD_LINES_NAMED:
                        say(f"warning: left out {item.message(source)}", style="yellow")
                    continue
                tally["documents"] += 1
                tally["bytes_of_text"] += len(item.text.encode())
                yield item.text
    if bad_lines > _BAD_LINES_NAMED:
        say(f"warning: left out {bad_lines:,} bad lines in all", style="yellow")
    if not tally["bytes_of_text"]:
        raise DataError(f"no documents with text in {', '.join(files)}")


def _byte_of_character() -> dict[str, int]:
    """The byte behind each character of GPT-2's printable alphabet, which `tokenizers` uses."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
