"""What the sub-commands share: arguments, and how a result is printed."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

COLLECTIVE = (  # what the ranks of a launch do together, and not each its own
    "train",
    "check",
    "perplexity",
    "frequency",
    "eval",
)

Config = Annotated[Path, typer.Argument(help="YAML configuration.", metavar="CONFIG.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to it, as `section.key=value`.", metavar="a.b=c"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="A step folder, or a run folder, whose newest whole checkpoint is then taken.",
        metavar="CKPT",
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        help="A step folder, a run folder (its newest whole checkpoint), or a Llama folder.",
        metavar="CKPT",
    ),
]

Profile = Annotated[
    str | None,
    typer.Option(
        metavar="steps=FIRST-LAST",
        help="Profile these steps on the first rank: run_dir/profile gets a trace for "
        "chrome://tracing or Perfetto, and tables of operators by module.",
    ),
]
MemorySnapshot = Annotated[
    bool,
    typer.Option(
        "--memory-snapshot",
        help="With --profile: every allocation of these steps too; memory.pickle on CUDA, "
        "memory.csv on the CPU.",
    ),
]


def is_another_rank() -> bool:
    """True in a rank of a launch for which rank 0 has the word; RANK alone says nothing."""
    rank = os.environ.get("RANK", "0")
    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    together = sys.argv[1:2] and sys.argv[1] in COLLECTIVE
    return bool(together) and launched and rank.isdecimal() and int(rank) > 0


def show(
    result: dict[str, Any], as_json: bool, as_text: Callable[[dict[str, Any]], str] | None = None
) -> None:
    """Prints a result, once for all ranks: one JSON line, or as people read it."""
    if is_another_rank():
        return
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        print((as_text or lines)(result))


def lines(result: dict[str, Any]) -> str:
    """A result without a table of its own: a line a value."""
    lines: list[str] = []
    for key, value in result.items():
        if value is None:
            continue
        if isinstance(value, dict) and all(isinstance(part, dict) for part in value.values()):
            lines += [f"{key:>24}  {name}: {_plain(parts)}" for name, parts in value.items()]
        else:
            lines.append(f"{key:>24}  {_plain(value)}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """A value as people read it: 1,234 and a = 1, b = 2."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
