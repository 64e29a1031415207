"""Counts of the package's structure: `python tests/structure.py`.

Prints the modules, lines of code (without blank lines, comments and docstrings), and the modules
that a single other module imports.
"""

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "leviathan"


def module_name(file: Path) -> str:
    """The dotted name of a module file."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, names: set[str]) -> set[str]:
    """The modules among `names` that a syntax tree imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in names else node.module
                for alias in node.names
            }
    return found & names


def code_lines(source: str) -> int:
    """Number of lines with code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored and token.string:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> None:
    """Prints the counts."""
    files = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}
    importers: dict[str, set[str]] = defaultdict(set)
    lines = {}
    for name, file in files.items():
        source = file.read_text(encoding="utf-8")
        lines[name] = code_lines(source)
        for other in imported_modules(ast.parse(source), set(files)) - {name}:
            importers[other].add(name)
    modules = {name for name in files if lines[name]}
    single = sorted(name for name in modules if len(importers[name]) == 1)
    print(f"{len(modules)} modules, {sum(lines.values()):,} lines of code")
    print(f"{len(single)} modules with a single importer:")
    for name in single:
        print(f"  {name} ({lines[name]}) ← {next(iter(importers[name]))}")


if __name__ == "__main__":
    main()
