"""Draws user-facing texts for a language review: `python tests/sample_texts.py 30 --seed 1`.

A text is the message of an error or warning, a help text, or the description of a configuration
key. Values in f-strings are shown as `{}`.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "leviathan"
CALLS = {"ConfigError", "DataError", "CheckpointError", "LocalRankError", "say", "add", "fail"}
KEYWORDS = {"help", "description", "message"}


def texts() -> Iterator[tuple[str, int, str]]:
    """Yields (file, line, text) of all user-facing texts."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = file.relative_to(PACKAGE.parent).as_posix()
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else None
                called = node.func.id if isinstance(node.func, ast.Name) else called
                values = [k.value for k in node.keywords if k.arg in KEYWORDS]
                values += node.args if called in CALLS | {"Option", "Argument"} else []
                for value in values:
                    text = _text(value)
                    if len(text.split()) > 2:
                        yield name, value.lineno, text
            if (
                isinstance(node, ast.FunctionDef)
                and "/cli/" in name
                and not node.name.startswith("_")
            ):
                yield name, node.lineno, ast.get_docstring(node) or ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return ""


def main() -> None:
    """Prints the texts that the seed selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="number of texts")
    parser.add_argument("--seed", type=int, required=True, help="seed of the selection")
    arguments = parser.parse_args()
    for file, line, text in random.Random(arguments.seed).sample(list(texts()), arguments.count):
        print(f"{file}:{line}\n    {text.replace(chr(10), chr(10) + '    ')}\n")


if __name__ == "__main__":
    main()
