"""The code and the documentation use the field's standard words, in American spelling.

Run on its own by `make check`. A word that is right in one place has an exception with a reason.
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".sbatch"}
PLACES = ("leviathan", "tests", "benchmarks", "docs", "configs", "data_prep", "launch", "eval")
PLACES += ("examples", "README.md", "CONTRIBUTING.md", "Makefile")

# British spelling → American spelling; matched at the beginning of a word.
BRITISH = {
    r"(?:de)?tokenis(?=e|i|a)": "tokeniz",
    r"materialis": "materializ",
    r"(?:re)?initialis": "initializ",
    r"normalis": "normaliz",
    r"optimis": "optimiz",
    r"recognis": "recogniz",
    r"summaris": "summariz",
    r"(?:de)?serialis": "serializ",
    r"(?:un)?organis": "organiz",
    r"generalis": "generaliz",
    r"parametris": "parametriz",
    r"quantis": "quantiz",
    r"synchronis": "synchroniz",
    r"minimis(?=e|i)": "minimiz",
    r"maximis(?=e|i)": "maximiz",
    r"randomis": "randomiz",
    r"factoris": "factoriz",
    r"penalis": "penaliz",
    r"standardis": "standardiz",
    r"analys(?=e\b|ed|ing)": "analyz",
    r"colour": "color",
    r"behaviour": "behavior",
    r"neighbour": "neighbor",
    r"favour": "favor",
    r"honour": "honor",
    r"centre": "center",
    r"grey\b": "gray",
    r"licence\b": "license",
    r"labell": "label",
    r"modell": "model",
    r"cancell(?=ed|ing)": "cancel",
    r"artefact": "artifact",
    r"catalogue": "catalog",
}
# Phrases of a private language → what to write.
PHRASES = {
    r"data sets?\b": "dataset",
    r"file systems?\b": "filesystem",
    r"goes on\b|go on\b|going on\b|gone on\b": "continue, resume",
    r"anew\b": "again, from step 0",
    r"shall\b": "must, will",
    r"mend(?:s|ed|ing)?\b": "fix, correct",
    r"amber\b": "warning",
    r"(?:is|are|as) meant\b": "intended",
    r"newest whole\b": "latest",
    r"whole checkpoints?\b": "valid checkpoint",
    r"nobody\b": "no rank, no process",
    r"has the word\b": "prints",
    r"at hand\b": "available",
    r"for ever\b": "forever",
    r"a circle\b": "a cycle",
    r"by and by\b": "gradually",
    r"none the worse\b": "unchanged",
    r"what is wrong\b": "the problem",
    r"our fault\b": "internal error",
    r"to the last bit\b": "bitwise",
    r"stands? (?:on|in|there|for what)\b": "is in",
    r"is no (?:valid|number|token|folder|file|such)\b": "is not a",
    r"left out\b|leaves? out\b|leaving out\b": "excluded, skipped",
}
# This list, and the tests that judge every change and are not edited.
EXCLUDED = (
    "tests/unit/test_language.py",
    "tests/distributed/test_resume.py",
    "tests/distributed/test_faults.py",
)
# (path, matched text in lower case): why it is right there.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def _files() -> list[Path]:
    files = []
    for place in PLACES:
        path = REPOSITORY / place
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    excluded = {REPOSITORY / name for name in EXCLUDED}
    return [f for f in files if f.is_file() and f.suffix in SUFFIXES and f not in excluded]


def _matches(patterns: dict[str, str], before: str) -> list[str]:
    """`path:line: found → expected` of every match."""
    every = {re.compile(before + f"(?:{p})", re.IGNORECASE): word for p, word in patterns.items()}
    lines = []
    for file in _files():
        name = file.relative_to(REPOSITORY).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, word in every.items():
                for match in pattern.finditer(line):
                    if (name, match[0].lower()) not in EXCEPTIONS:
                        lines.append(f"{name}:{number}: {match[0]!r} → {word}: {line.strip()}")
    return lines


def test_spelling_is_american() -> None:
    lines = _matches(BRITISH, r"(?<![A-Za-z])")
    assert not lines, "\n".join(lines)


def test_phrases_are_standard() -> None:
    lines = _matches(PHRASES, r"(?<![A-Za-z_`.])")
    assert not lines, "\n".join(lines)
