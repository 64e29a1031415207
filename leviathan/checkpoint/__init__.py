"""The one checkpoint format of every engine and layout; see `save` and `boxes`."""
