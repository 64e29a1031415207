"""Reads `index.json`, the list of MDS shards in a directory, of ours or other converters."""

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from leviathan.errors import DataError


class _File(Protocol):
    @property
    def basename(self) -> str: ...


class _Shard(Protocol):
    @property
    def raw_data(self) -> _File: ...


Entry = TypeVar("Entry", bound=_Shard)


def _check_inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a path inside the directory of index.json")
    if str(path) != name:  # so that one file has one name
        raise ValueError(f"{name!r} is not in normal form, expected {str(path)!r}")
    return name


# The path of a shard relative to index.json; `merge_index` of streaming includes subfolders.
InsideFolder = Annotated[str, AfterValidator(_check_inside)]


class _Versioned(BaseModel):
    version: Literal[2] = 2


def read_index_json(path: Path, entry: type[Entry]) -> list[Entry]:
    """Reads the shards that an `index.json` lists.

    Args:
        path: path of the file.
        entry: pydantic model of one shard's entry.

    Raises:
        DataError: the file cannot be read, does not match `entry`, or lists a file twice.
    """
    try:
        content = json.loads(path.read_bytes())
        _Versioned.model_validate(content)
        entries: Any = dict[Literal["shards"], list[entry]]  # pyright: ignore
        shards = TypeAdapter(entries).validate_python({"shards": content["shards"]})["shards"]
    except OSError as error:
        raise DataError(
            "dataset.incomplete", f"{path}: {error.strerror}: the dataset is incomplete"
        ) from None
    except ValidationError as error:
        raise DataError("dataset.corrupt", _explain(path, error.errors()[0])) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            "dataset.corrupt", f"{path} is empty or corrupt. Copy or prepare the dataset again"
        ) from None
    names = Counter(file.basename for shard in shards for file in _files(shard))
    if twice := [name for name, count in names.items() if count > 1]:
        raise DataError(
            "dataset.corrupt",
            f"{path} lists the shard {twice[0]} {names[twice[0]]} times. Write the index again; "
            "if several directories were merged, include the directory of each shard in its "
            "basename",
        )
    return shards


def _files(shard: Any) -> list[_File]:
    """The files of a shard: raw, and compressed where there is such an entry."""
    packed = getattr(shard, "zip_data", None)
    return [shard.raw_data, packed] if packed is not None else [shard.raw_data]


def _explain(path: Path, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        return f"{path}: {where} is {error['input']!r}, expected {expected}"
    if error["type"] == "extra_forbidden":
        return f"{path}: {where}: unknown key, which may change the meaning of the shards"
    if error["type"] == "value_error":
        return f"{path}: {where}: {error['ctx']['error']}"
    return (
        f"{path} is empty or corrupt ({where}: {error['msg']}). Copy or prepare the dataset again"
    )
