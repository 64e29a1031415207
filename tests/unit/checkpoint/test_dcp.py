import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from errors import raises_error
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader

from leviathan.checkpoint.dcp import (
    Chunk,
    FlatShard,
    check_tensors,
    chunks_of,
    load_shards,
    save_shards,
    stored_shapes,
    uncovered,
)
from leviathan.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_tile_a_slice_in_flat_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - start))
    whole = torch.arange(numel).view(shape)
    tiled = []
    for box in chunks_of(shape, start, count):
        assert box.at == len(tiled)
        part = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        tiled += part.reshape(-1).tolist()
    assert tiled == list(range(start, start + count))


def test_a_slice_of_a_matrix_is_at_most_three_boxes():
    counts = {
        len(list(chunks_of((7, 5), start, count)))
        for start in range(35)
        for count in range(36 - start)
    }
    assert max(counts) == 3


def cuts(tensors, pieces):
    """Every tensor cut into `pieces` flat slices of about equal length."""
    for key, tensor in tensors.items():
        edges = [tensor.numel() * i // pieces for i in range(pieces + 1)]
        for first, last in itertools.pairwise(edges):
            yield FlatShard(key, tuple(tensor.shape), first, tensor.view(-1)[first:last])


@pytest.mark.parametrize(("written", "read"), [(1, 3), (2, 1), (3, 2), (5, 4)])
def test_any_layout_reads_what_any_other_wrote(tmp_path, written, read):
    tensors = {
        "vector": torch.randn(11),
        "matrix": torch.randn(7, 5),
        "cube": torch.randn(3, 4, 5),
        "single": torch.randn(1),
    }
    save_shards(cuts(tensors, written), tmp_path)
    assert stored_shapes(tmp_path) == {k: tuple(t.shape) for k, t in tensors.items()}
    found = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    load_shards(cuts(found, read), tmp_path)
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key


def parts(tensors, dims, peers, pieces):
    """Every tensor cut along a dimension, and each part of it, contiguous, into flat slices."""
    for key, tensor in tensors.items():
        size = tensor.shape[dims[key]] // peers
        for peer, part in enumerate(tensor.split(size, dims[key])):
            offsets = [peer * size if dim == dims[key] else 0 for dim in range(tensor.dim())]
            box = Chunk(tuple(offsets), tuple(part.shape))
            for piece in cuts({key: part.contiguous()}, pieces):
                yield FlatShard(key, tuple(tensor.shape), piece.start, piece.flat, box)


@pytest.mark.parametrize(
    ("written", "read"), [((2, 3), (4, 2)), ((4, 1), (1, 3)), ((1, 2), (2, 1))]
)
def test_slices_of_parts_are_boxes_of_the_whole(tmp_path, written, read):
    tensors = {
        "rows": torch.randn(8, 5),
        "columns": torch.randn(3, 8),
        "cube": torch.randn(3, 4, 2),
    }
    dims = {"rows": 0, "columns": 1, "cube": 1}
    save_shards(parts(tensors, dims, *written), tmp_path)
    assert stored_shapes(tmp_path) == {k: tuple(t.shape) for k, t in tensors.items()}
    found = list(parts({k: torch.zeros_like(t) for k, t in tensors.items()}, dims, *read))
    load_shards(found, tmp_path)
    for piece, wanted in zip(found, parts(tensors, dims, *read), strict=True):
        assert piece.flat.equal(wanted.flat), piece.key


def test_another_models_tensors_are_named(tmp_path):
    save_shards(cuts({"model.a": torch.randn(4, 4), "model.b": torch.randn(2)}, 1), tmp_path)
    check_tensors(tmp_path, {"model.a": (4, 4), "model.b": (2,)})
    with raises_error("checkpoint.other_model", "model.a", "4×5", "4×4", error=CheckpointError):
        check_tensors(tmp_path, {"model.a": (4, 5), "model.b": (2,)})
    names = ("model.b", "expected none", "found 2")
    with raises_error("checkpoint.other_model", *names, error=CheckpointError):
        check_tensors(tmp_path, {"model.a": (4, 4)})


def edited_metadata(directory, edit):
    """Rewrites `.metadata` after `edit(entry of the tensor "matrix", storage_data)`."""
    metadata = FileSystemReader(directory).read_metadata()
    edit(metadata.state_dict_metadata["matrix"], metadata.storage_data)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def remove_chunk(entry, _):
    entry.chunks.pop(1)


def repeat_chunk(entry, _):
    entry.chunks[1] = entry.chunks[0]


def overlap_chunks(entry, _):
    first = entry.chunks[0]
    entry.chunks[0] = replace(first, sizes=torch.Size((first.sizes[0] + 1, first.sizes[1])))


def move_outside(entry, _):
    last = entry.chunks[-1]
    entry.chunks[-1] = replace(last, offsets=torch.Size((last.offsets[0] + 1, 0)))


def drop_a_dimension(entry, _):
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size((10,)))


def empty_chunks(entry, _):
    entry.chunks.clear()


def forget_the_bytes(_, storage):
    del storage[next(index for index in storage if index.fqn == "matrix")]


def point_past_the_file(_, storage):
    next(info for index, info in storage.items() if index.fqn == "matrix").offset += 10**6


@pytest.mark.parametrize(
    "edit",
    [
        remove_chunk,
        repeat_chunk,
        overlap_chunks,
        move_outside,
        drop_a_dimension,
        empty_chunks,
        forget_the_bytes,
        point_past_the_file,
    ],
)
def test_a_tensor_with_holes_is_refused_by_name(tmp_path, edit):
    """DCP itself would leave such elements as they were in memory and report success."""
    tensors = {"vector": torch.randn(11), "matrix": torch.randn(8, 5)}
    save_shards(cuts(tensors, 4), tmp_path)
    stored_shapes(tmp_path)
    edited_metadata(tmp_path, edit)
    with raises_error("checkpoint.corrupt", ".metadata", "matrix 8×5", error=CheckpointError):
        stored_shapes(tmp_path)
    with raises_error("checkpoint.corrupt", "matrix", error=CheckpointError):
        check_tensors(tmp_path, {key: tuple(t.shape) for key, t in tensors.items()})


@given(SHAPES, st.integers(1, 6), st.data())
def test_chunks_that_cover_a_tensor_pass_and_any_single_change_does_not(shape, pieces, data):
    numel = math.prod(shape)
    edges = [numel * i // pieces for i in range(pieces + 1)]
    chunks = [
        box.metadata
        for first, last in itertools.pairwise(edges)
        for box in chunks_of(shape, first, last - first)
    ]
    data.draw(st.randoms()).shuffle(chunks)
    assert uncovered(shape, chunks) is None
    place = data.draw(st.integers(0, len(chunks) - 1))
    assert uncovered(shape, chunks[:place] + chunks[place + 1 :]) is not None
    assert uncovered(shape, [*chunks, chunks[place]]) is not None


class Harmful:
    def __reduce__(self):
        return print, ("code of a stranger",)


def test_metadata_cannot_run_code(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with raises_error("checkpoint.corrupt", ".metadata", "print", error=CheckpointError):
        stored_shapes(tmp_path)
    assert not capsys.readouterr().out
