"""The encodings that tiktoken publishes: their patterns and special tokens, known offline.

A `.tiktoken` file contains only ranks. If the ranks are those of a published encoding, its pattern
and special tokens are known. For any other file, a `.meta.json` file must state them.
"""

import hashlib
from dataclasses import dataclass, field

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
