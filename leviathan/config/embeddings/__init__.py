"""The input embeddings by `kind`.

Each kind is one module here, with its configuration, parameter count and FLOPs, and one module of
the same name in `leviathan.model.embeddings`, with the computation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, TypeVar, Union

from pydantic import Field

from leviathan.config.embeddings.base import InputEmbeddingConfig

T = TypeVar("T")
KINDS = (
    "tied",
    "untied",
    "albert",
    "flat_mlp",
    "factored_mlp",
    "binary_codes",
    "leviathan",
    "leviathan_v1",
)


def kind_class(package: str, kind: str, base: type[T]) -> type[T]:
    """The class of a kind: the last subclass of `base` that the module `package.kind` defines."""
    module = import_module(f"{package}.{kind}")
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base)]
    return [c for c in classes if c.__module__ == module.__name__][-1]


if TYPE_CHECKING:
    EmbeddingConfig = InputEmbeddingConfig
else:
    _MODELS = tuple(kind_class(__name__, kind, InputEmbeddingConfig) for kind in KINDS)
    EmbeddingConfig = Annotated[Union[_MODELS], Field(discriminator="kind")]  # noqa: UP007
