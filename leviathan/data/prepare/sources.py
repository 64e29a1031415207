"""Finds the sources of a corpus: files, directories, globs, URLs and the Hub."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from leviathan.config.schema import HubConfig, PrepConfig, SourceConfig, ValidationConfig
from leviathan.console import say
from leviathan.data.prepare.local_files import FileIdentity, first_names, list_local, printable
from leviathan.data.prepare.source import (
    ByteSource,
    FileSource,
    Source,
    Split,
    keep_corpus_files,
)
from leviathan.errors import DataError


def find_splits(config: PrepConfig) -> list[tuple[Source, Split]]:
    """Lists the sources of a preparation in order, each with its split.

    Raises:
        DataError: no files are found, or none remains for training.
    """
    held_out = _find(config.validation, "validation.hub")
    kind: Split = "hash" if config.validation.fraction and not held_out else "train"
    training: list[Source] = []
    both: list[str] = []
    for identity, source in _find(config.source, "source.hub").items():
        if identity not in held_out:
            training.append(source)
        elif held_out[identity].name == source.name:
            both.append(source.name)
        else:
            both.append(f"{source.name} (as {held_out[identity].name})")
    if both:
        verb = "is" if len(both) == 1 else "are"
        say(f"{first_names(both)} {verb} held out for validation and not used for training")
    if not training:
        raise DataError(
            "source.all_held_out",
            "every file of source.paths is held out: no file remains for training",
        )
    splits: list[tuple[Source, Split]] = [(source, kind) for source in _grouped(training)]
    return splits + [(source, "val") for source in _grouped(held_out.values())]


def find_inputs(patterns: Sequence[str]) -> list[Source]:
    """Lists the sources that `patterns` match, pattern by pattern, each in name order.

    Directories are searched recursively, including links to directories. Hidden files and files of
    other types in a directory or glob are skipped with a warning; a file given by its name is
    always read. A file that is listed twice, even under different paths, is read once. The text
    files of a directory become one source.

    Raises:
        DataError: a pattern matches no readable file, or a file name is not UTF-8.
    """
    return _grouped(_find_files(patterns).values())


def _find(config: SourceConfig | ValidationConfig, hub_key: str) -> dict[str, Source]:
    """The files or shards of one configuration section, by identity."""
    return dict(_find_files(config.paths)) if config.hub is None else _find_hub(config.hub, hub_key)


def _find_hub(hub: HubConfig, key: str) -> dict[str, Source]:
    from leviathan.data.prepare.hub import find_hub

    # Two revisions of a shard have the same name but different data.
    return {f"{source.name} {source.stamp()}": source for source in find_hub(hub, key)}


def _grouped(sources: Iterable[Source]) -> list[Source]:
    from leviathan.data.prepare.text_files import group_texts

    return group_texts(sources)


def _find_files(patterns: Sequence[str]) -> dict[str, ByteSource]:
    """Every file that `patterns` match, once, by identity."""
    from leviathan.data.prepare.urls import find_urls, is_url

    files = FileIdentity()
    found: dict[str, ByteSource] = {}
    repeated: list[str] = []
    for pattern in patterns:
        sources = find_urls(pattern) if is_url(pattern) else _find_local(pattern)
        _check_names(sources)
        identities = [_identity(source, files) for source in sources]
        chosen: dict[str, ByteSource] = {}
        for source, identity in zip(sources, identities, strict=True):
            best = chosen.get(identity, source)
            chosen[identity] = min(source, best, key=lambda each: _spelling(each, identity))
        for source, identity in zip(sources, identities, strict=True):
            kept = found.get(identity, chosen[identity])
            if kept is not source:
                same = kept.name == source.name
                repeated.append(source.name if same else f"{source.name} (as {kept.name})")
            elif identity not in found:
                found[identity] = source
    if repeated:
        verb = "is" if len(repeated) == 1 else "are"
        say(f"warning: {first_names(repeated)} {verb} listed twice and read once", style="yellow")
    return found


def _identity(source: ByteSource, files: FileIdentity) -> str:
    """A string that is equal for all spellings of one file."""
    from leviathan.data.prepare.urls import UrlSource

    if isinstance(source, FileSource):
        return files.of(source.path)
    assert isinstance(source, UrlSource)
    return files.of(source.location) if source.is_local else source.location


def _spelling(source: ByteSource, identity: str) -> tuple[bool, int, str]:
    """Sort key of spellings: the minimum has no links, is short, and is first in name order."""
    return str(Path(source.name).absolute()) != identity, source.name.count("/"), source.name


def _check_names(sources: Iterable[ByteSource]) -> None:
    """Raises an error for file names that dataset.json cannot record, before any work is done."""
    for source in sources:
        try:
            source.name.encode()
        except UnicodeEncodeError:
            raise DataError(
                "source.name_not_utf8",
                f"{printable(source.name)}: this file name is not UTF-8 (bytes shown as \\x…): "
                "rename the file or its directory",
            ) from None


def _find_local(pattern: str) -> list[ByteSource]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [FileSource(path)]
    if (listing := list_local(path)) is not None:
        listing.warn(pattern)
        return keep_corpus_files(map(FileSource, listing.files), pattern)
    if path.exists():
        raise DataError(
            "source.not_regular",
            f"{pattern} is not a regular file. Give files, directories or globs",
        )
    if path.is_symlink():
        raise DataError("source.broken_link", f"{pattern} is a broken link to {path.readlink()}")
    raise DataError("source.not_found", f"no such file or directory: {pattern} (in {Path.cwd()})")
