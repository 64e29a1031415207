"""Leviathan: pretraining of small language models with continuous input embeddings."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leviathan.model.embeddings.public import LeviathanEmbedding as LeviathanEmbedding

__version__ = "0.1.0"
__all__ = ["LeviathanEmbedding"]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import leviathan` is fast."""
    if name == "LeviathanEmbedding":
        from leviathan.model.embeddings.public import LeviathanEmbedding

        return LeviathanEmbedding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
