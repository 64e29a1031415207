"""Corpus → data set: find files, read documents, tokenise file by file, pack into MDS rows."""

from leviathan.data.prepare.merge import merge
from leviathan.data.prepare.pipeline import prepare
from leviathan.data.prepare.verify import verify

__all__ = ["merge", "prepare", "verify"]
