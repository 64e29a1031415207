"""Pages written from the code that they describe: `make docs`.

docs/configuration.md comes from the models that read the configuration, and the table in
docs/checkpoints.md of keys that may change from `leviathan.config.identity`.
"""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from leviathan.config.identity import markdown_table
from leviathan.config.schema import ModelFile, PrepConfig, RunConfig
from leviathan.config.study import StudyConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
CHECKPOINTS_PAGE = PAGE.with_name("checkpoints.md")
_BEGIN = "<!-- Written by `make docs` from leviathan/config/identity.py. -->\n"
_END = "<!-- End of what `make docs` writes. -->\n"
_FILES: dict[str, tuple[type[BaseModel], str]] = {
    "A run": (RunConfig, "`leviathan train`, `launch`, `check`; examples in `configs/run/`."),
    "A model alone": (ModelFile, "`leviathan params`; examples in `configs/model/`."),
    "A preparation": (PrepConfig, "`leviathan prep`; examples in `configs/data/`."),
    "A study": (StudyConfig, "`leviathan study`; examples in `configs/experiments/`."),
}
_HEAD = """# Configuration

Every key of every file, from the models that read them. Written by `make docs`: edit the
descriptions in `leviathan/config/`, not this page.

A configuration is YAML. `extends:` names one or more files to begin with, relative to the file it
stands in; later values win. Every command that takes a file also takes `key.sub_key=value` after
it, read as YAML. A section of another `kind` starts afresh: the keys of the former kind are
dropped. Paths are relative to the working directory. An unknown key or a wrong value ends the
command with status 2 and one line for each mistake.

*required* under "default" means that the key must be given; a default in italics is worked out
from other keys. The resolved configuration, with all of them filled in, is `run_dir/config.yaml`.
"""
_SIGNS = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}
_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "`true`, `false`",
    Path: "path",
    ByteSize: "bytes, as `200GB`",
    Any: "anything",
    type(None): "`null`",
}


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    seen: set[type[BaseModel]] = set()
    for title, (schema, said) in _FILES.items():
        parts.append(f"## {title}\n\n{said}\n")
        parts += _sections(schema, "", seen)
    return "\n".join(parts)


def checkpoints_page(text: str) -> str:
    """docs/checkpoints.md with its table of keys as `leviathan.config.identity` has it."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert after, f"{CHECKPOINTS_PAGE}: the marks around the table are gone"
    return f"{before}{_BEGIN}\n{markdown_table()}\n\n{_END}{after}"


def _sections(schema: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """The table of a section, then those of the sections in it; each model once."""
    seen.add(schema)
    kind = schema.model_fields.get("kind")
    chosen = f"`kind: {get_args(kind.annotation)[0]}`" if kind is not None else ""
    heading = " ".join(part for part in (f"`{path}`" if path else "", chosen) if part)
    purpose = _first_line(schema)
    if heading:
        yield f"### {heading}\n\n{purpose}\n"
    rows = [_row(schema, name, field) for name, field in schema.model_fields.items()]
    yield "\n".join(
        ["| key | type and range | default | meaning |", "|---|---|---|---|", *rows, ""]
    )
    for name, field in schema.model_fields.items():
        for model in _models(field.annotation):
            if model not in seen:
                where = f"{path}.{name}" if path else name
                yield from _sections(model, where + _repeated(field.annotation), seen)


def _first_line(schema: type[BaseModel]) -> str:
    return (schema.__doc__ or "").strip().splitlines()[0]


def _row(schema: type[BaseModel], name: str, field: FieldInfo) -> str:
    models = _models(field.annotation)
    assert field.description or models or name == "kind", f"{schema.__name__}.{name}: no meaning"
    meaning = field.description or " / ".join(dict.fromkeys(map(_first_line, models)))
    if name == "kind":
        meaning = "which one this is"
    elif len(models) > 1 and not field.description:
        meaning = "one of the kinds below"
    said = _type(field.annotation, field.metadata)
    cells = (f"`{name}`", said, _default(name, field), meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """An annotation in words, with the range that its metadata give."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0], [*_flat(inner[1:]), *metadata])
    if origin in (Union, types.UnionType):
        if models := _models(annotation):
            optional = ", `null`" if type(None) in inner else ""
            return f"section{' of a `kind`' if len(models) > 1 else ''}{optional}"
        return ", ".join(_type(part, [] if part is type(None) else metadata) for part in inner)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (list, tuple):
        items = dict.fromkeys(_type(part, []) for part in inner)
        return f"list of {' and '.join(items)}{_range(metadata)}"
    if origin is dict:
        return f"name → {_type(inner[1], [])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _WORDS[annotation] + _range(metadata)


def _flat(metadata: Any) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _range(metadata: list[Any]) -> str:
    bounds = [
        f"{sign} {getattr(item, attribute):g}"
        for item in metadata
        for kind, (sign, attribute) in _SIGNS.items()
        if isinstance(item, kind)
    ]
    filled = any(isinstance(item, MinLen) for item in metadata)
    return (" " + ", ".join(bounds) if bounds else "") + (", not empty" if filled else "")


def _default(name: str, field: FieldInfo) -> str:
    if name == "kind":
        return ""
    if isinstance(field.json_schema_extra, dict) and "default" in field.json_schema_extra:
        return f"*{field.json_schema_extra['default']}*"
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=field.default_factory is not None)
    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return f"kind `{kind}`" if kind else "its defaults"
    value = list(value) if isinstance(value, tuple) else value
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _repeated(annotation: Any) -> str:
    return ".NAME" if get_origin(annotation) is dict else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    former = CHECKPOINTS_PAGE.read_text(encoding="utf-8")
    CHECKPOINTS_PAGE.write_text(checkpoints_page(former), encoding="utf-8")
    sys.stderr.write(f"{PAGE}, {CHECKPOINTS_PAGE}: written\n")
