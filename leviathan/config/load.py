"""YAML files with `extends:` and `a.b=c` overrides into a validated configuration.

Every problem is collected before anything is raised, so that a user mends a file once. Paths in a
configuration are relative to the working directory; `extends:` to the file it stands in.
"""

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from leviathan.config.explain import explain
from leviathan.errors import ConfigError

COMMAND_LINE = "command line"
EXTENDS = "extends"

C = TypeVar("C", bound=BaseModel)
Origins = dict[tuple[str, ...], str]  # dotted path → where it was written, "file:line"


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and reads 1e-3 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} appears twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """Parses one YAML mapping; `source` names it in errors.

    Raises:
        ConfigError: not YAML, a duplicate key, or not a mapping at the top.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected `key: value` lines, found {type(data).__name__}")
    return data


def _key_lines(text: str, source: str) -> Origins:
    """Where each dotted key of a YAML text stands, as "file:line"."""
    origins: Origins = {}

    def visit(node: yaml.Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, str(key.value))
                origins[here] = f"{source}:{key.start_mark.line + 1}"
                visit(value, here)

    visit(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return origins


def _merge(base: dict[str, Any], over: dict[str, Any], origins: Origins, where: Origins) -> None:
    """Lays `over` onto `base` in place; another `kind` starts its mapping afresh."""

    def lay(base: dict[str, Any], over: dict[str, Any], path: tuple[str, ...]) -> None:
        if "kind" in over and over["kind"] != base.get("kind", over["kind"]):
            base.clear()
        for key, value in over.items():
            here = (*path, str(key))
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                lay(base[key], value, here)
                continue
            origins[here] = where.get(here, COMMAND_LINE)
            if isinstance(value, dict):
                base[key] = {}
                lay(base[key], value, here)
            else:
                base[key] = value

    lay(base, over, ())


def _read_file(path: Path, origins: Origins, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One file with everything it extends, merged."""
    if path.resolve() in chain:
        circle = " → ".join(str(file) for file in (*chain, path.resolve()))
        raise ConfigError(f"{path}: `extends` goes in a circle: {circle}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        by = f" (extended by {chain[-1]})" if chain else ""
        raise ConfigError(f"{path}: no such configuration file{by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    data = read_yaml(text, str(path))
    parents = data.pop(EXTENDS, [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: `extends` is a file name or a list of them, found {parents!r}")
    merged: dict[str, Any] = {}
    for parent in parents:
        own: Origins = {}
        inherited = _read_file(path.parent / parent, own, (*chain, path.resolve()))
        _merge(merged, inherited, origins, own)
    _merge(merged, data, origins, _key_lines(text, str(path)))
    return merged


def _override(text: str) -> tuple[tuple[str, ...], Any]:
    """`a.b=c` as (path, value); the value is read as YAML."""
    dotted, equals, value = text.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"{COMMAND_LINE}: {text!r} is not an override; write key.sub_key=value")
    try:
        return path, yaml.load(value, Loader=_Loader)
    except yaml.YAMLError:
        raise ConfigError(f"{COMMAND_LINE}: {dotted}: {value!r} is not valid YAML") from None


def read_config(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Origins]:
    """The merged but not yet validated mapping, and where each of its keys was written.

    Raises:
        ConfigError: a file or override that cannot be read.
    """
    origins: Origins = {}
    merged = _read_file(path, origins)
    for text in overrides:
        keys, value = _override(text)
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        parent = merged
        for key in keys[:-1]:
            parent = parent.get(key, {}) if isinstance(parent, dict) else None
        if parent is not None and not isinstance(parent, dict):
            raise ConfigError(
                f"{COMMAND_LINE}: {'.'.join(keys)}: "
                f"{'.'.join(keys[:-1])} is a value ({parent!r}), not a section"
            )
        _merge(merged, nested, origins, {})
    return merged, origins


def validate(data: dict[str, Any], schema: type[C], source: str, origins: Origins) -> C:
    """A mapping as a `schema`, or one ConfigError that lists every problem."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, data, schema, source, origins)) from None


def load_config(path: Path | str, overrides: Sequence[str], schema: type[C]) -> C:
    """Reads, merges and validates a configuration file.

    Args:
        path: the YAML file.
        overrides: `a.b=c` texts, later ones win.
        schema: the pydantic model to validate against.

    Raises:
        ConfigError: with every problem found, each naming file and line, dotted path, what was
            found, what was expected and the nearest right spelling.
    """
    data, origins = read_config(Path(path), overrides)
    return validate(data, schema, str(path), origins)


def parse_config(text: str, schema: type[C], source: str = "configuration") -> C:
    """A configuration from YAML text, as `dump_config` wrote it."""
    return validate(read_yaml(text, source), schema, source, {})


def dump_config(config: BaseModel) -> str:
    """The resolved configuration as YAML; `parse_config` gives it back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
