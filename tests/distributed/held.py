"""Bytes of all tensors that a process holds, counted by torch, and their peak in some work."""

import gc
import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)


class Held(TorchDispatchMode):
    """While in use, looks after every operation at the storages that are alive, each counted once.

    Storages are asked for their size each time: FSDP2 empties them and fills them again.

    Args:
        apart: storages that are not counted: `storages()` of an earlier moment.

    Attributes:
        before: bytes at the beginning.
        peak: bytes at the most.
        at: the operation after which that was.
    """

    def __init__(self, apart=()):
        super().__init__()
        self._apart = apart

    def __enter__(self):
        self._storages = weakref.WeakSet(s for s in storages() if s not in self._apart)
        self.before = self.peak = self._bytes()
        self.at = "the beginning"
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        now = self._bytes()
        if now > self.peak:
            self.peak, self.at = now, str(func)
        return found

    def _note(self, tensor):
        storage = storage_of(tensor)
        if storage is not None and storage not in self._apart:
            self._storages.add(storage)

    def _bytes(self):
        return sum(storage.nbytes() for storage in self._storages)


def storage_of(tensor):
    """Address of the values of a tensor; None if it has none."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    real = tensor.device.type != "meta" and tensor.layout == torch.strided
    return tensor.untyped_storage() if real else None


def storages():
    """Those of all tensors that are alive."""
    gc.collect()
    found = (storage_of(thing) for thing in gc.get_objects() if type(thing) in TENSORS)
    return weakref.WeakSet(storage for storage in found if storage is not None)
