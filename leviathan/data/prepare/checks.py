"""What a corpus is found to be like: too bad to go on with, or worth a warning."""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from leviathan.config.schema import PrepConfig
from leviathan.console import say
from leviathan.data.format import REJECTS_FILE, DatasetInfo
from leviathan.data.prepare.records import bad_lines
from leviathan.data.prepare.tokenise import PartInfo
from leviathan.errors import DataError

# max_reject_fraction counts from here on: of five lines, one bad one says nothing yet.
FEW_REJECTS = 100


def check_rejects(parts: Mapping[Path, PartInfo], limit: float, share: float = 1) -> None:
    """Ends a hopeless preparation.

    Args:
        parts: finished ones by their folders, in order.
        limit: on bad lines over lines.
        share: of the corpus that they are of. The rest is taken to have as many lines and no bad
            one, so that the order in which files are done decides nothing.

    Raises:
        DataError: more of the lines are bad than `limit` allows.
    """
    rejected = sum(info.rejected for info in parts.values())
    lines = rejected + sum(info.documents + info.empty for info in parts.values())
    if rejected > FEW_REJECTS and rejected * share > limit * lines:
        folder = next(folder for folder, info in parts.items() if info.rejected)
        with (folder / REJECTS_FILE).open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        raise DataError(
            f"{rejected:,} of {lines:,} lines are bad, more than max_reject_fraction={limit}; the "
            f"first is {first['file']}:{first['line']}: {first['reason']}. Finished files are "
            "kept: repair the bad ones, or raise max_reject_fraction, and run the same "
            "`leviathan prep` again"
        )


def _check_subsets(infos: Sequence[PartInfo], config: PrepConfig) -> None:
    """Points out names in `source.subsets` that no document has."""
    seen = {name for info in infos for name in [*info.subsets, *info.excluded]}
    for name in [*config.source.subsets.include, *config.source.subsets.exclude]:
        if name not in seen:
            near = difflib.get_close_matches(name, seen, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"seen: {', '.join(sorted(seen)[:30])}"
            say(f"warning: source.subsets: no document is of {name!r}; {hint}", style="yellow")


def check_documents(infos: Sequence[PartInfo], config: PrepConfig) -> None:
    """Points out what is odd about the corpus.

    Raises:
        DataError: there are no documents in it.
    """
    documents = sum(info.documents for info in infos)
    rejected = sum(info.rejected for info in infos)
    if not any(info.bytes for info in infos):
        raise DataError(
            f"no documents in {', '.join(info.path for info in infos[:5])}: only empty files "
            "(0 bytes); download or copy them again"
        )
    if not documents:
        raise DataError(
            f"no documents in {', '.join(info.path for info in infos[:5])}: "
            f"{sum(info.empty for info in infos)} empty texts, {bad_lines(rejected)}, "
            f"{sum(sum(info.excluded.values()) for info in infos)} left out by source.subsets"
        )
    _check_subsets(infos, config)
    seen: dict[str, str] = {}
    for info in infos:
        if not info.documents:
            why = "" if info.bytes else ": it is empty (0 bytes)"
            say(f"warning: {info.path} holds no documents{why}", style="yellow")
        elif info.content in seen:
            say(
                f"warning: {info.path} holds the same texts as {seen[info.content]}", style="yellow"
            )
        seen.setdefault(info.content, info.path)
    if rejected:
        say(f"warning: {bad_lines(rejected)} left out, see {REJECTS_FILE}", style="yellow")


def check_validation(infos: Sequence[PartInfo], made: DatasetInfo, config: PrepConfig) -> None:
    """Points out that the fraction to be held out came to nothing."""
    if "val" not in made.splits and any(info.split == "hash" for info in infos):
        say(
            f"warning: validation.fraction={config.validation.fraction} held out none of "
            f"{made.documents:,} documents, so there is no validation split: raise it, or name "
            "files in validation.paths",
            style="yellow",
        )
