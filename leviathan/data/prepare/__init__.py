"""Corpus → dataset: find files, read documents, tokenize file by file, pack into MDS rows."""

from leviathan.data.prepare.merge import merge
from leviathan.data.prepare.pipeline import prepare
from leviathan.data.prepare.verify import verify

__all__ = ["merge", "prepare", "verify"]
