"""Reads YAML files with `extends:` and `a.b=c` overrides into a validated configuration.

All problems of a file are reported together. Paths in a configuration are relative to the working
directory, those of `extends:` to the file.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from leviathan.config.explain import explain, other_kind
from leviathan.credentials import cleaned, without_credentials
from leviathan.errors import ConfigError

COMMAND_LINE = "command line"
EXTENDS = "extends"

C = TypeVar("C", bound=BaseModel)
Origins = dict[tuple[str, ...], str]  # dotted path → where it was set, "file:line"
MAX_BYTES, MAX_NODES, MAX_DEPTH = 10_000_000, 100_000, 50  # of a configuration


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that reads 1e-3 as a number and 2024-02-29 as text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, Any]]]] = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # for example from `!!int abc`
            kind = node.tag.rpartition(":")[2]
            raise _refusal(
                node,
                f"{without_credentials(str(node.value))[:60]!r} is not a valid {kind} ({error})",
            ) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _refusal(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


class _Checker:
    """Rejects duplicate keys, keys that are not scalars, cycles, and excessive size or depth.

    An alias counts as often as it is used, because validation and output expand it. Each node is
    visited once.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # of the checked nodes, with all aliases expanded
        self._open: set[int] = set()

    def size(self, node: yaml.Node) -> int:
        """Number of nodes below and including `node`."""
        if id(node) in self._open:
            raise _refusal(node, "this section refers to itself")
        if id(node) not in self._sizes:
            if len(self._open) > MAX_DEPTH:
                raise _refusal(node, f"nested more than {MAX_DEPTH} levels deep")
            self._open.add(id(node))
            size = 1 + sum(self.size(child) for child in self._children(node))
            self._open.remove(id(node))
            if size > MAX_NODES:
                raise _refusal(node, f"more than {MAX_NODES:,} values, with aliases expanded")
            self._sizes[id(node)] = size
        return self._sizes[id(node)]

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            return node.value
        if not isinstance(node, yaml.MappingNode):
            return []
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal(key, "a key must be a scalar, not a list or a section")
            if key.value in seen:
                raise _refusal(key, f"key {key.value!r} appears twice")
            seen.add(key.value)
        return [value for _, value in node.value]


def _key_lines(root: yaml.Node | None, source: str) -> Origins:
    """Location of each dotted key of a YAML text, as "file:line"."""
    origins: Origins = {}

    def visit(node: yaml.Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, str(key.value))
                origins[here] = f"{source}:{key.start_mark.line + 1}"
                visit(value, here)

    visit(root, ())
    return origins


def _parse(text: str, source: str) -> tuple[Any, Origins]:
    """Value of a YAML text and the locations of its keys.

    Raises:
        ConfigError: not YAML, or not a valid structure.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, {}
        _Checker().size(root)
        value = loader.construct_document(root)  # resolves merge keys (`<<`) in the nodes
        return value, _key_lines(root, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
    except RecursionError:
        where, problem = source, "nested too deeply"
    except ValueError as error:  # an escape sequence that is not a character
        where, problem = source, str(error)
    raise ConfigError("config.invalid_yaml", f"{where}: not valid YAML: {problem}")


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """Parses a YAML mapping; `source` names it in errors.

    Raises:
        ConfigError: not YAML, a duplicate key, or not a mapping.
    """
    return _mapping(_parse(text, source)[0], source)


def _mapping(data: Any, source: str) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            "config.invalid_yaml",
            f"{source}: expected `key: value` lines, found {type(data).__name__}",
        )
    return data


def _merge(base: dict[str, Any], over: dict[str, Any], origins: Origins, where: Origins) -> None:
    """Merges `over` into `base` in place; a different `kind` replaces its mapping."""

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
    """A file merged with all files that it extends."""
    try:
        resolved = path.resolve()
        if resolved in chain:
            circle = " → ".join(str(file) for file in (*chain, resolved))
            raise ConfigError("config.circular_extends", f"{path}: cycle in `extends`: {circle}")
        with path.open("rb") as file:  # bounded, because it may be a pipe or a device
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                "config.too_large", f"{path}: larger than {MAX_BYTES:,} bytes: not a configuration"
            )
        text = content.decode()
    except FileNotFoundError:
        by = f" (extended by {chain[-1]})" if chain else ""
        raise ConfigError("config.not_found", f"{path}: configuration file not found{by}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a null byte
        raise ConfigError("config.unreadable", f"{str(path)!r}: cannot be read: {error}") from None
    value, lines = _parse(text, str(path))
    data = _mapping(value, str(path))
    parents = data.pop(EXTENDS, [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(
            "config.invalid_extends",
            f"{path}: `extends` is a file name or a list of them, found {parents!r}",
        )
    merged: dict[str, Any] = {}
    for parent in parents:
        own: Origins = {}
        inherited = _read_file(path.parent / parent, own, (*chain, resolved))
        _merge(merged, inherited, origins, own)
    _merge(merged, data, origins, lines)
    return merged


def _override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parses `a.b=c` as (path, value); the value is read as YAML."""
    dotted, equals, value = text.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise ConfigError(
            "config.invalid_override",
            f"{COMMAND_LINE}: {text[:60]!r} is not an override; expected key.sub_key=value",
        )
    try:
        return path, _parse(value, COMMAND_LINE)[0]
    except ConfigError as error:
        reason = str(error).partition("not valid YAML: ")[2]
        raise ConfigError(
            "config.invalid_override",
            f"{COMMAND_LINE}: {dotted}: {without_credentials(value)[:60]!r} is not valid YAML: "
            f"{reason}",
        ) from None


def lay(
    data: dict[str, Any],
    origins: Origins,
    keys: tuple[str, ...],
    value: Any,
    where: str = COMMAND_LINE,
) -> None:
    """Sets a dotted key of a merged mapping in place; `where` is its location.

    Raises:
        ConfigError: a part of the key is a value, not a section.
    """
    nested: Any = value
    for key in reversed(keys):
        nested = {key: nested}
    parent: Any = data
    for key in keys[:-1]:
        parent = parent.get(key, {}) if isinstance(parent, dict) else None
    if parent is not None and not isinstance(parent, dict):
        raise ConfigError(
            "config.invalid_override",
            f"{where}: {'.'.join(keys)}: "
            f"{'.'.join(keys[:-1])} is a value ({parent!r}), not a section",
        )
    _merge(data, nested, origins, dict.fromkeys(_paths(nested), where))


def _paths(tree: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all keys of a nested mapping."""
    if not isinstance(tree, dict):
        return []
    here = [(*above, str(key)) for key in tree]
    return here + [path for key in tree for path in _paths(tree[key], (*above, str(key)))]


def read_config(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Origins]:
    """The merged mapping before validation, and the location of each of its keys.

    Raises:
        ConfigError: a file or an override cannot be read.
    """
    origins: Origins = {}
    merged = _read_file(path, origins)
    for text in overrides:
        keys, value = _override(text)
        lay(merged, origins, keys, value)
    return merged, origins


def validate(data: dict[str, Any], schema: type[C], source: str, origins: Origins) -> C:
    """Validates a mapping against `schema`; raises one ConfigError that lists all problems."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        own = {key for key in data if origins.get((key,)) != COMMAND_LINE}
        if another := other_kind(own, schema):
            raise ConfigError("config.wrong_type", f"{source}: {another}") from None
        raise ConfigError("config.invalid", explain(error, data, schema, source, origins)) from None


def load_config(path: Path | str, overrides: Sequence[str], schema: type[C]) -> C:
    """Reads, merges and validates a configuration file.

    Args:
        path: the YAML file.
        overrides: `a.b=c` texts; later ones take precedence.
        schema: the pydantic model to validate against.

    Raises:
        ConfigError: lists all problems, each with file and line, dotted key, found and expected
            value, and a spelling suggestion.
    """
    data, origins = read_config(Path(path), overrides)
    return validate(data, schema, str(path), origins)


def parse_config(text: str, schema: type[C], source: str = "configuration") -> C:
    """Parses the YAML text of `dump_config`."""
    return validate(read_yaml(text, source), schema, source, {})


def dump_config(config: BaseModel) -> str:
    """The resolved configuration as YAML, from which `parse_config` restores it.

    Passwords and tokens in URLs are removed, because others may read these files.
    """
    stored = cleaned(config.model_dump(mode="json"))
    return yaml.safe_dump(stored, sort_keys=False, allow_unicode=True)
