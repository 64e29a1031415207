"""Corpus → dataset: finds files, reads documents, tokenizes file by file, and packs MDS samples."""

from leviathan.data.prepare.merge import merge
from leviathan.data.prepare.pipeline import prepare
from leviathan.data.prepare.verify import verify

__all__ = ["merge", "prepare", "verify"]
