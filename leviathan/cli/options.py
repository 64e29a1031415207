"""Arguments and output that the commands share."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

COLLECTIVE = (  # commands whose ranks work together, so that only rank 0 prints
    "train",
    "check",
    "perplexity",
    "frequency",
    "eval",
)

Config = Annotated[Path, typer.Argument(help="YAML configuration.", metavar="CONFIG.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, as `section.key=value`.", metavar="a.b=c"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint, or run directory (its latest valid checkpoint).",
        metavar="CKPT",
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint, run directory (its latest valid checkpoint), or Llama model.",
        metavar="CKPT",
    ),
]

Profile = Annotated[
    str | None,
    typer.Option(
        metavar="steps=FIRST-LAST",
        help="Profile these steps on rank 0. Writes a trace for Perfetto and tables of operators "
        "by module to run_dir/profile.",
    ),
]
MemorySnapshot = Annotated[
    bool,
    typer.Option(
        "--memory-snapshot",
        help="Record the allocations of the profiled steps: memory.pickle on CUDA, memory.csv on "
        "the CPU.",
    ),
]


def is_another_rank() -> bool:
    """Whether this process is a rank other than 0 of a launch whose ranks work together."""
    rank = os.environ.get("RANK", "0")
    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    together = sys.argv[1:2] and sys.argv[1] in COLLECTIVE
    return bool(together) and launched and rank.isdecimal() and int(rank) > 0


def show(
    result: dict[str, Any], as_json: bool, as_text: Callable[[dict[str, Any]], str] | None = None
) -> None:
    """Prints a result on rank 0: as one line of JSON, or formatted."""
    if is_another_rank():
        return
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        print((as_text or lines)(result))


def lines(result: dict[str, Any]) -> str:
    """Formats a result as one line per value."""
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
    """Formats a value: 1,234, or a = 1, b = 2."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
