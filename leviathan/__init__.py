"""Leviathan: pretraining of small language models with continuous input embeddings."""

__version__ = "0.1.0"
