"""Flat slices of parameters, written and read through DCP as chunks of the full tensor.

ZeRO splits the concatenation of all parameters into equal flat partitions, so a rank has a flat
slice of a parameter. A flat slice of an R × C matrix consists of at most three chunks (the end of a
row, full rows, the start of a row). With tensor parallelism that matrix is itself a part of a
larger one, and its chunks are offset accordingly. Stored as chunks, a checkpoint does not depend on
the layout that wrote it, and every rank of any other layout reads only the chunks it needs.
"""

import math
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from leviathan.errors import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """A chunk: a rectangular part of a tensor, and its start `at` in a flat slice."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int = 0

    def offset_in(self, outer: "Chunk") -> "Chunk":
        """Returns this chunk of `outer` with offsets relative to the tensor of `outer`."""
        offsets = (a + b for a, b in zip(outer.offsets, self.offsets, strict=True))
        return replace(self, offsets=tuple(offsets))

    def view_of(self, full: Tensor) -> Tensor:
        """The chunk as a view of the tensor."""
        ranges = zip(self.offsets, self.sizes, strict=True)
        return full[tuple(slice(start, start + size) for start, size in ranges)]

    def from_flat(self, flat: Tensor) -> Tensor:
        """The chunk as a view of its flat slice, in the chunk's shape."""
        return flat[self.at : self.at + math.prod(self.sizes)].view(self.sizes)

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """The chunk as DCP's metadata."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


@dataclass(frozen=True)
class FlatShard:
    """Elements `start … start + flat.numel()`, in row-major order, of the fp32 tensor `key`.

    With tensor parallelism, elements of the rectangular `part` of it on this rank.
    """

    key: str
    shape: tuple[int, ...]  # of the full tensor
    start: int
    flat: Tensor  # [n] contiguous fp32; a view of the engine's memory, so loading writes into it
    chunk: Chunk | None = None

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of the full tensor that tile the slice, in flat order."""
        part = self.chunk or Chunk((0,) * len(self.shape), self.shape)
        for chunk in chunks_of(part.sizes, self.start, self.flat.numel()):
            yield chunk.offset_in(part)


def chunks_of(shape: tuple[int, ...], start: int, count: int) -> Iterator[Chunk]:
    """The chunks that tile `count` elements from `start` of a tensor, in flat order."""
    if count == 0:
        return
    if len(shape) <= 1:
        yield Chunk((start,) * len(shape), (count,) * len(shape), 0)
        return
    row = math.prod(shape[1:])
    done = 0
    while done < count:
        index, inside = divmod(start + done, row)
        full = (count - done) // row if inside == 0 else 0
        if full:
            zeros = (0,) * (len(shape) - 1)
            yield Chunk((index, *zeros), (full, *shape[1:]), done)
            done += full * row
        else:
            part = min(count - done, row - inside)
            for chunk in chunks_of(shape[1:], inside, part):
                yield Chunk((index, *chunk.offsets), (1, *chunk.sizes), done + chunk.at)
            done += part


class _ShardIndex:
    """Slices indexed for DCP: (tensor, chunk offsets) → the memory view of the chunk."""

    def __init__(self, slices: Iterable[FlatShard]) -> None:
        self.slices = [piece for piece in slices if piece.flat.numel()]
        self.chunks = [list(piece.chunks()) for piece in self.slices]
        self.views = {
            (piece.key, chunk.offsets): chunk.from_flat(piece.flat)
            for piece, chunks in zip(self.slices, self.chunks, strict=True)
            for chunk in chunks
        }

    def view(self, index: MetadataIndex) -> Tensor:
        return self.views[index.fqn, tuple(index.offset or ())]


class _SavePlanner(SavePlanner):
    def __init__(self, pieces: _ShardIndex) -> None:
        self.pieces = pieces

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(piece.key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk.metadata,
                    properties=TensorProperties(dtype=piece.flat.dtype),
                    size=torch.Size(piece.shape),
                ),
            )
            for piece, chunks in zip(self.pieces.slices, self.pieces.chunks, strict=True)
            for chunk in chunks
        ]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces.view(write_item.index).detach()


class _LoadPlanner(LoadPlanner):
    def __init__(self, pieces: _ShardIndex) -> None:
        self.pieces = pieces
        self.metadata: Metadata | None = None

    def set_up_planner(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for piece, chunks in zip(self.pieces.slices, self.pieces.chunks, strict=True):
            stored = self.metadata.state_dict_metadata[piece.key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(
                piece.key, stored, [chunk.metadata for chunk in chunks]
            )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(
            "checkpoint.corrupt",
            f"entry {read_item.storage_index.fqn}: expected a tensor, found bytes",
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self.pieces.view(read_item.dest_index)
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to the classes in DCP's metadata."""

    ADMITTED = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES = frozenset(
        {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
        | {("torch", "device"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")}
    )
    CLASSES = frozenset(
        {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "StorageMeta"}
        | {"ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo"}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module in self.ADMITTED and name in self.CLASSES) or (module, name) in self.NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


class _MetadataReader(FileSystemReader):
    """DCP's reader with restricted unpickling, so that metadata cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except FileNotFoundError:
            raise CheckpointError(
                "checkpoint.incomplete",
                f"{path.parent}: .metadata is missing: the checkpoint is incomplete. Use another "
                "one",
            ) from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise CheckpointError(
                "checkpoint.corrupt", f"{path}: cannot read the metadata ({error})"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                "checkpoint.corrupt", f"{path}: corrupt: expected the metadata of torch DCP"
            )
        return metadata


def save_shards(
    slices: Iterable[FlatShard], directory: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Writes the slices of every rank. Collective if there is a process group.

    The slices of all ranks must cover each tensor exactly once. In a background thread, `group`
    must be a process group that no other thread uses.

    Raises:
        CheckpointError: a rank cannot write; raised on every rank.
    """
    writer, planner = FileSystemWriter(directory), _SavePlanner(_ShardIndex(slices))
    with _quiet(), _plain_errors(directory):
        save(
            {},
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint.

    Raises:
        CheckpointError: the metadata is missing or unreadable, the chunks of a tensor do not
            cover each of its elements exactly once, or a chunk's bytes are not in the files.
    """
    metadata = _MetadataReader(directory).read_metadata()
    shapes: dict[str, tuple[int, ...]] = {}
    stored = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    file_sizes = {file.name: file.stat().st_size for file in directory.glob("*.distcp")}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shapes[key] = tuple(entry.size)
        reason = uncovered(shapes[key], entry.chunks)
        reason = reason or _without_bytes(key, entry.chunks, stored, file_sizes)
        if reason is not None:
            raise CheckpointError(
                "checkpoint.corrupt",
                f"{directory / '.metadata'}: tensor {key} {_shape(shapes[key])}: {reason}. The "
                "checkpoint is corrupt: use another one",
            )
    return shapes


def uncovered(shape: tuple[int, ...], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Why `chunks` do not cover each element of a tensor exactly once; None if they do."""
    for chunk in chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a chunk has {len(sizes)} dimensions, the tensor has {len(shape)}"
        bounds = zip(offsets, sizes, shape, strict=True)
        if not all(offset >= 0 and 0 < size <= full - offset for offset, size, full in bounds):
            return f"the chunk {_shape(sizes)} at {list(offsets)} is not inside the tensor"
    covered, numel = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if covered < numel:
        return f"its chunks cover {covered:,} of {numel:,} elements"
    starts = np.array([tuple(c.offsets) for c in chunks], np.int64).reshape(len(chunks), -1)
    ends = starts + np.array([tuple(c.sizes) for c in chunks], np.int64).reshape(len(chunks), -1)
    for number in range(len(chunks) - 1):
        rest = slice(number + 1, None)
        overlap = (starts[rest] < ends[number]) & (starts[number] < ends[rest])
        if overlap.all(axis=1).any():
            return f"the chunk at {starts[number].tolist()} overlaps another chunk"
    return None  # disjoint, inside the tensor, and with as many elements as it: they cover it


def _without_bytes(
    key: str,
    chunks: Sequence[ChunkStorageMetadata],
    stored: Mapping[MetadataIndex, Any],
    file_sizes: Mapping[str, int],
) -> str | None:
    """Which chunk has no bytes in the checkpoint's files; None if all chunks have."""
    for chunk in chunks:
        place = stored.get(MetadataIndex(key, chunk.offsets))
        if place is None:
            return f"nothing is stored for the chunk at {list(chunk.offsets)}"
        size = file_sizes.get(place.relative_path, -1)
        if not 0 <= place.offset <= place.offset + place.length <= size:
            return (
                f"the chunk at {list(chunk.offsets)} is missing from {place.relative_path} "
                f"({max(size, 0):,} bytes)"
            )
    return None


def check_tensors(
    directory: Path, expected: Mapping[str, tuple[int, ...]], prefix: str = ""
) -> None:
    """Checks that a checkpoint contains exactly the tensors of this model.

    Args:
        directory: the checkpoint.
        expected: name → shape.
        prefix: only stored names with this prefix are compared.

    Raises:
        CheckpointError: it belongs to another model; the message names the first tensors that
            differ.
    """
    stored = stored_shapes(directory)
    stored = {key: shape for key, shape in stored.items() if key.startswith(prefix)}
    differing = [
        f"{key}: expected {_shape(expected.get(key))}, found {_shape(stored.get(key))}"
        for key in sorted({*expected, *stored})
        if expected.get(key) != stored.get(key)
    ]
    if differing:
        raise CheckpointError(
            "checkpoint.other_model",
            f"{directory}: checkpoint of another model: {len(differing)} tensors differ ("
            + "; ".join(differing[:3])
            + ("; …)" if len(differing) > 3 else ")"),
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else "×".join(map(str, shape)) or "scalar"


def load_shards(slices: Iterable[FlatShard], directory: Path, collective: bool = True) -> None:
    """Loads slices from a checkpoint of any layout. Call `check_tensors` first.

    Collective if there is a process group, unless `collective` is False.

    Raises:
        CheckpointError: a rank cannot read; raised on every rank.
    """
    reader, planner = _MetadataReader(directory), _LoadPlanner(_ShardIndex(slices))
    single_process = not (collective and dist.is_initialized())
    with _quiet(), _plain_errors(directory):
        load({}, storage_reader=reader, planner=planner, no_dist=single_process)


@contextmanager
def _plain_errors(directory: Path) -> Iterator[None]:
    """Converts DCP's exception, a BaseException with all ranks' tracebacks, to CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(
            "checkpoint.save_failed", f"{directory}: rank {rank}: {cause}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses DCP's warning about a missing process group, which one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
