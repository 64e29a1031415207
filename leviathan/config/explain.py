"""Messages for validation errors: file and line, dotted key, found value, expected value."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from leviathan.config.experiment import ExperimentConfig
from leviathan.config.schema import ModelFile, PrepConfig, RunConfig
from leviathan.config.suggest import nearest, synonym
from leviathan.credentials import without_credentials

Path = tuple[str, ...]
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)*")

_FORMATS: dict[type[BaseModel], str] = {
    PrepConfig: "a dataset configuration for `leviathan prep` (configs/data)",
    RunConfig: "a run configuration for `leviathan train` (configs/run)",
    ModelFile: "a model configuration for `leviathan params` (configs/model)",
    ExperimentConfig: "an experiment for `leviathan experiment` (configs/experiments)",
}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The configuration models in an annotation (several for a union of kinds)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None and not get_args(annotation):
        return []
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _model_at(schema: type[BaseModel], path: Path, data: Any) -> type[BaseModel] | None:
    """The model of the section at `path`, selected by its `kind`."""
    model: type[BaseModel] | None = schema
    for key in path:
        field = model.model_fields.get(key) if model else None
        data = data.get(key) if isinstance(data, Mapping) else None
        if field is None:
            return None
        models = _models_in(field.annotation)
        kind = data.get("kind") if isinstance(data, Mapping) else None
        default = [m for m in models if kind is None and m is field.default_factory]
        model = next(
            (m for m in models if "kind" not in m.model_fields or kind == _kind_of(m)),
            models[0] if len(models) == 1 else default[0] if default else None,
        )
    return model


def _kind_of(model: type[BaseModel]) -> str | None:
    choices = get_args(model.model_fields["kind"].annotation)
    return choices[0] if choices else None


def _all_keys(schema: type[BaseModel], path: Path = ()) -> Iterator[Path]:
    for name, field in schema.model_fields.items():
        yield (*path, name)
        for model in _models_in(field.annotation):
            yield from _all_keys(model, (*path, name))


def _without_tags(loc: tuple[Any, ...], data: Any, missing: bool) -> Path:
    """The location without the union tags that pydantic inserts (`embedding.leviathan.knots`)."""
    path: list[str] = []
    for index, key in enumerate(loc):
        is_last = index == len(loc) - 1
        tagged = isinstance(data, Mapping) and key not in data and data.get("kind", key) == key
        if tagged and not (is_last and missing):
            continue
        path.append(str(key))
        if isinstance(data, Mapping):
            data = data.get(key)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            data = None
    return tuple(path)


def _unknown_key(path: Path, schema: type[BaseModel], data: Any) -> str:
    """Hint for an unknown key: the key to use instead."""
    section, key = path[:-1], path[-1]
    model = _model_at(schema, section, data) or schema
    siblings = list(model.model_fields)
    known = {".".join(each): each for each in _all_keys(schema)}
    ours = synonym(key)
    if ours in known:
        return f"unknown key; use {ours}"
    if ours and " " in ours:
        return f"unknown key; {ours}"
    if near := nearest(key, siblings):
        return f"unknown key; did you mean {'.'.join((*section, near))}?"
    for dotted, each in known.items():
        if each[-1] == key:
            return f"unknown key; did you mean {dotted}?"
    return f"unknown key; expected one of {', '.join(siblings)}"


def other_kind(keys: set[str], schema: type[BaseModel]) -> str | None:
    """Returns a sentence if the top-level keys are those of another kind of configuration."""
    unknown = sorted(keys - set(schema.model_fields))
    for other, described in _FORMATS.items():
        if len(unknown) > 1 and other is not schema and keys <= set(other.model_fields):
            return (
                f"found {described}, with the keys {', '.join(unknown)}; expected "
                f"{_FORMATS.get(schema, 'another kind of configuration')}"
            )
    return None


def _found(value: Any) -> str:
    text = without_credentials(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}…"


def _sentence(error: Any, path: Path, schema: type[BaseModel], data: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, schema, data)
    if kind == "missing":
        return "missing; this key is required"
    if kind == "union_tag_not_found":
        return f"`kind` is missing; expected one of {_tags(path, schema)}"
    if kind == "union_tag_invalid":
        near = nearest(str(context["tag"]), context["expected_tags"].replace("'", "").split(", "))
        hint = f"; did you mean {near}?" if near else ""
        return f"found kind {context['tag']!r}, expected one of {context['expected_tags']}{hint}"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(str(error["input"]), choices)
        hint = f"; did you mean {near}?" if near else ""
        return f"found {_found(error['input'])}, expected {context['expected']}{hint}"
    if kind in ("model_type", "model_attributes_type"):
        return f"found {_found(error['input'])}, expected a section of `key: value` lines"
    if kind == "value_error":
        return str(context["error"])
    if kind == "path_type":
        return f"found {_found(error['input'])}, expected a path"
    message = error["msg"]
    if message.startswith("Input should "):
        expected = message.removeprefix("Input should ").removeprefix("be ")
        return f"found {_found(error['input'])}, expected {expected}"
    return f"found {_found(error['input'])}: {message[:1].lower()}{message[1:]}"


def _tags(path: Path, schema: type[BaseModel]) -> str:
    model = _model_at(schema, path[:-1], {})
    field = model.model_fields.get(path[-1]) if model else None
    kinds = [_kind_of(m) for m in _models_in(field.annotation)] if field else []
    return ", ".join(repr(kind) for kind in kinds)


def explain(
    error: ValidationError,
    data: dict[str, Any],
    schema: type[BaseModel],
    source: str,
    origins: Mapping[Path, str],
) -> str:
    """One line per problem: `file:line: dotted.path: what was found, what was expected`."""
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        if problem["type"] == "default_factory_not_called":
            continue  # the field it is computed from is reported
        path = _without_tags(problem["loc"], data, problem["type"] == "missing")
        if problem["type"] == "union_tag_invalid":
            path = (*path, "kind")
        sentence = _sentence(problem, path, schema, data)
        # A contradiction between keys is at the keys that the sentence names.
        named = [(*path, *key.split(".")) for key in _KEY.findall(sentence)]
        spots = [origins[key] for key in named if key in origins]
        if problem["type"] != "value_error" or not spots:
            # For a missing key, the line of its section.
            above = [path[:n] for n in range(len(path), 0, -1)]
            spots = [origins[key] for key in above if key in origins][:1] or [source]
        start = ", ".join(sorted(set(spots)))
        lines.append(": ".join([start, *([".".join(path)] if path else []), sentence]))
    return "\n".join(lines)
