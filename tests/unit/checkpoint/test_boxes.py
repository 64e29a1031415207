import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leviathan.checkpoint.boxes import (
    Box,
    Slice,
    boxes_of,
    check_tensors,
    load_slices,
    save_slices,
    stored_shapes,
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
    for box in boxes_of(shape, start, count):
        assert box.at == len(tiled)
        part = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        tiled += part.reshape(-1).tolist()
    assert tiled == list(range(start, start + count))


def test_a_slice_of_a_matrix_is_at_most_three_boxes():
    counts = {
        len(list(boxes_of((7, 5), start, count)))
        for start in range(35)
        for count in range(36 - start)
    }
    assert max(counts) == 3


def cuts(tensors, pieces):
    """Every tensor cut into `pieces` flat slices of about equal length."""
    for key, tensor in tensors.items():
        edges = [tensor.numel() * i // pieces for i in range(pieces + 1)]
        for first, last in itertools.pairwise(edges):
            yield Slice(key, tuple(tensor.shape), first, tensor.view(-1)[first:last])


@pytest.mark.parametrize(("written", "read"), [(1, 3), (2, 1), (3, 2), (5, 4)])
def test_any_layout_reads_what_any_other_wrote(tmp_path, written, read):
    tensors = {
        "vector": torch.randn(11),
        "matrix": torch.randn(7, 5),
        "cube": torch.randn(3, 4, 5),
        "single": torch.randn(1),
    }
    save_slices(cuts(tensors, written), tmp_path)
    assert stored_shapes(tmp_path) == {k: tuple(t.shape) for k, t in tensors.items()}
    found = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    load_slices(cuts(found, read), tmp_path)
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key


def parts(tensors, dims, peers, pieces):
    """Every tensor cut along a dimension, and each part of it, contiguous, into flat slices."""
    for key, tensor in tensors.items():
        size = tensor.shape[dims[key]] // peers
        for peer, part in enumerate(tensor.split(size, dims[key])):
            offsets = [peer * size if dim == dims[key] else 0 for dim in range(tensor.dim())]
            box = Box(tuple(offsets), tuple(part.shape))
            for piece in cuts({key: part.contiguous()}, pieces):
                yield Slice(key, tuple(tensor.shape), piece.start, piece.flat, box)


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
    save_slices(parts(tensors, dims, *written), tmp_path)
    assert stored_shapes(tmp_path) == {k: tuple(t.shape) for k, t in tensors.items()}
    found = list(parts({k: torch.zeros_like(t) for k, t in tensors.items()}, dims, *read))
    load_slices(found, tmp_path)
    for piece, wanted in zip(found, parts(tensors, dims, *read), strict=True):
        assert piece.flat.equal(wanted.flat), piece.key


def test_another_models_tensors_are_named(tmp_path):
    save_slices(cuts({"model.a": torch.randn(4, 4), "model.b": torch.randn(2)}, 1), tmp_path)
    check_tensors(tmp_path, {"model.a": (4, 4), "model.b": (2,)})
    with pytest.raises(CheckpointError, match=r"another model.*model\.a: 4×5 here, 4×4 there"):
        check_tensors(tmp_path, {"model.a": (4, 5), "model.b": (2,)})
    with pytest.raises(CheckpointError, match=r"model\.b: none here, 2 there"):
        check_tensors(tmp_path, {"model.a": (4, 4)})


class Harmful:
    def __reduce__(self):
        return print, ("code of a stranger",)


def test_metadata_cannot_run_code(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match="has no place in a checkpoint"):
        stored_shapes(tmp_path)
    assert not capsys.readouterr().out
