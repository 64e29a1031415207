"""The checkpoint format of all engines and layouts; see `save` and `dcp`."""
