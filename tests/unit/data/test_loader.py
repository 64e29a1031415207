"""The stream: every row once an epoch, the same batches for any world size."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import raises_error

from leviathan.config.run import ModelConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.loader import (
    IGNORE,
    PADDING_SAMPLE,
    Batch,
    ShuffleOrder,
    TrainLoader,
    check_fits,
    eval_batches,
    padded_count,
    permutation,
)
from leviathan.data.mds import ShardReader
from leviathan.data.prepare import verify


def stream(path: Path, batch: int = 16, micro: int = 4, window: int = 100, seed: int = 1):
    return TrainLoader(path, seed, window, batch, micro)


def model(**changes: object) -> ModelConfig:
    fields = {
        "d_model": 16,
        "n_layers": 1,
        "n_heads": 2,
        "seq_len": 32,
        "vocab_size": 601,
        "embedding": {"kind": "tied"},
    }
    return ModelConfig.model_validate(fields | changes)


# ---------------------------------------------------------------- order


def test_every_epoch_visits_every_row_once_in_another_order() -> None:
    order = ShuffleOrder(np.array([7, 1, 12, 3]), "f", seed=3, window=5)
    epochs = [order.at(epoch * 23, 23) for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows) == list(range(23))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_any_position_is_found_directly() -> None:
    order = ShuffleOrder(np.array([7, 1, 12, 3]), "f", seed=3, window=5)
    undisturbed = order.at(0, 100)
    for start in range(0, 100, 7):
        fresh = ShuffleOrder(np.array([7, 1, 12, 3]), "f", seed=3, window=5)
        assert np.array_equal(fresh.at(start, 100 - start), undisturbed[start:])


def test_order_depends_on_seed_and_fingerprint() -> None:
    rows = np.array([50])
    orders = [ShuffleOrder(rows, *key, 50).at(0, 50) for key in [("a", 1), ("a", 2), ("b", 1)]]
    assert len({order.tobytes() for order in orders}) == 3


def test_a_window_holds_rows_of_neighboring_shards_only() -> None:
    order = ShuffleOrder(np.full(10, 10), "f", seed=0, window=20)
    for window in range(5):
        assert len(np.unique(order.at(window * 20, 20) // 10)) == 2


def test_permutation_is_pinned() -> None:
    """Resuming after an upgrade needs the same order: these numbers must never change."""
    assert permutation("leviathan", 10).tolist() == [0, 3, 7, 5, 1, 8, 6, 4, 9, 2]


# ---------------------------------------------------------------- training batches


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5, 7, 16])
def test_ranks_share_the_global_batch(tiny_dataset: Path, dp: int) -> None:
    loader = stream(tiny_dataset)
    for step in (0, 3):
        ranks = [loader.microbatches(step, rank, dp) for rank in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        assert len({batch.input_ids.shape for batches in ranks for batch in batches}) == 1
        assert max(len(batch.rows) for batch in ranks[0]) <= 4
        rows = [row for batches in ranks for batch in batches for row in batch.rows]
        assert [row for row in rows if row != PADDING_SAMPLE] == loader.sample_numbers(
            step
        ).tolist()


def test_batches_are_a_function_of_the_step(tiny_dataset: Path) -> None:
    one, other = stream(tiny_dataset), stream(tiny_dataset)
    forwards = [one.microbatches(step, 0, 2) for step in range(6)]
    for step in (5, 0, 3, 4, 3):
        for batch, expected in zip(other.microbatches(step, 0, 2), forwards[step], strict=True):
            assert batch.rows == expected.rows
            assert torch.equal(batch.input_ids, expected.input_ids)


def test_epochs_go_on_without_a_gap(tiny_dataset: Path) -> None:
    loader = stream(tiny_dataset)
    rows = loader.info.splits["train"].rows
    steps = 2 * rows // 16 + 1
    seen = np.concatenate([loader.sample_numbers(step) for step in range(steps)])
    assert sorted(seen[:rows]) == list(range(rows))
    assert sorted(seen[rows : 2 * rows]) == list(range(rows))


def test_batch_contents(tiny_dataset: Path) -> None:
    rows = ShardReader(tiny_dataset / "train")
    for batch in stream(tiny_dataset).microbatches(0, 0, 1):
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.unique_ids[batch.inverse], batch.input_ids)
        assert torch.equal(batch.unique_ids, batch.unique_ids.sort().values)
        assert len(batch.unique_ids) == padded_count(len(batch.input_ids.unique()))
        for place, number in enumerate(batch.rows):
            row = rows[number]
            assert batch.input_ids[place].tolist() == row.tokens[:-1].tolist()
            assert (
                batch.targets[place].tolist()[: row.n_valid - 1]
                == row.tokens[1:].tolist()[: row.n_valid - 1]
            )


def test_filler_rows_score_nothing(tiny_dataset: Path) -> None:
    batches = [b for rank in range(3) for b in stream(tiny_dataset).microbatches(0, rank, 3)]
    fillers = [
        b.targets[i] for b in batches for i, row in enumerate(b.rows) if row == PADDING_SAMPLE
    ]
    assert fillers
    assert all((targets == IGNORE).all() for targets in fillers)
    assert sum(b.n_targets for b in batches) == 16 * 32


def test_to_moves_every_tensor(tiny_dataset: Path) -> None:
    batch = next(eval_batches(tiny_dataset, "val", 2)).to("meta")
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 257, 1400, 4300, 29_000, 200_019])
def test_unique_ids_take_few_sizes(count: int) -> None:
    assert count <= padded_count(count) <= max(64, count * 1.25 + 16)
    assert padded_count(padded_count(count)) == padded_count(count)


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("micro", "dp"), [(4, 1), (3, 2), (1000, 2), (1, 3)])
def test_every_row_is_evaluated_once(tiny_dataset: Path, micro: int, dp: int) -> None:
    info = DatasetInfo.load(tiny_dataset)
    ranks = [list(eval_batches(tiny_dataset, "val", micro, rank, dp)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    rows = [row for batch in batches for row in batch.rows if row != PADDING_SAMPLE]
    assert rows == list(range(info.splits["val"].rows))
    assert sum(batch.n_targets for batch in batches) == info.splits["val"].tokens


def test_more_ranks_than_rows(tiny_dataset: Path) -> None:
    rows = DatasetInfo.load(tiny_dataset).splits["val"].rows
    dp = rows - 1  # ranks take two rows each until none are left
    ranks = [list(eval_batches(tiny_dataset, "val", 2, rank, dp)) for rank in range(dp)]
    assert {len(batches) for batches in ranks} == {1}
    assert sum(batch.n_targets for batches in ranks for batch in batches) == (
        DatasetInfo.load(tiny_dataset).splits["val"].tokens
    )


def test_targets_know_their_document_and_subset(tiny_dataset: Path) -> None:
    info = DatasetInfo.load(tiny_dataset)
    document = 0
    for batch in eval_batches(tiny_dataset, "val", 4):
        for targets, documents, subsets in _targets(batch):
            for target, found, subset in zip(targets, documents, subsets, strict=True):
                if target == IGNORE:
                    assert found == subset == -1
                    continue
                assert found == document
                assert 0 <= subset < len(info.subsets)
                document += target == info.tokenizer.end_of_text
    assert document == info.splits["val"].documents


def _targets(batch: Batch):
    assert batch.doc_ids is not None
    assert batch.subset_ids is not None
    return zip(
        batch.targets.tolist(), batch.doc_ids.tolist(), batch.subset_ids.tolist(), strict=True
    )


# ---------------------------------------------------------------- what does not fit


def test_check_fits(tiny_dataset: Path) -> None:
    info = DatasetInfo.load(tiny_dataset)
    check_fits(info, model(), 16)
    with raises_error("data.vocab_size_mismatch", "model.vocab_size=601"):
        check_fits(info, model(vocab_size=700), 16)
    with raises_error("data.seq_len_mismatch", "model.seq_len=32"):
        check_fits(info, model(seq_len=64), 16)
    with raises_error("data.too_few_samples"):
        check_fits(info, model(), 1_000_000)
    with raises_error("data.too_few_samples"):
        stream(tiny_dataset, batch=1_000_000)


def corrupt_copy(tiny_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dataset, tmp_path / "corrupt"))


def test_missing_shard(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    (data / "train/shard.00000.mds").unlink()
    with raises_error("shard.missing", "shard.00000.mds"):
        stream(data)


def test_only_a_packed_shard(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    shard = data / "train/shard.00000.mds"
    shard.rename(shard.with_name("shard.00000.mds.zstd"))
    with raises_error("shard.missing", "shard.00000.mds.zstd"):
        stream(data)


def test_truncated_shard(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    shard = data / "val/shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-10])
    with raises_error("shard.corrupt", "val/shard.00000.mds"):
        next(eval_batches(data, "val", 4))


@pytest.mark.parametrize("keep", [0, 0.5])
def test_damaged_index(tiny_dataset: Path, tmp_path: Path, keep: float) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    index = data / "train/index.json"
    index.write_bytes(index.read_bytes()[: int(keep * index.stat().st_size)])
    with raises_error("dataset.corrupt", "train/index.json"):
        stream(data)


def test_no_data_set(tiny_dataset: Path, tmp_path: Path) -> None:
    with raises_error("dataset.not_found", tmp_path / "nowhere"):
        DatasetInfo.load(tmp_path / "nowhere")
    (tmp_path / "p.yaml").write_text("")
    with raises_error("dataset.not_found", "p.yaml"):
        DatasetInfo.load(tmp_path / "p.yaml")
    data = corrupt_copy(tiny_dataset, tmp_path)
    (data / "dataset.json").write_text('{"format_version": 1')
    with raises_error("dataset.corrupt", "dataset.json"):
        stream(data)
    (data / "dataset.json").unlink()
    with raises_error("dataset.not_found", "dataset.json"):
        stream(data)
    (data / ".prep").mkdir()
    with raises_error("dataset.not_found"):
        stream(data)


def test_a_tokenizer_that_does_not_fit(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    path = data / "tokenizer.meta.json"
    meta = json.loads(path.read_bytes())
    path.write_text(json.dumps(meta | {"fingerprint": "0" * 64}))
    with raises_error("tokenizer.mismatch"):
        stream(data)
    path.unlink()
    with raises_error("tokenizer.corrupt", "tokenizer.meta.json"):
        stream(data)
    (data / "tokenizer.tiktoken").unlink()
    with raises_error("tokenizer.not_found", "tokenizer.tiktoken"):
        stream(data)


def edit(file: Path, change: Callable[[Any], None]) -> None:
    """Changes a JSON file as somebody with an editor would."""
    content = json.loads(file.read_bytes())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(vocab_size=-1), ("dataset.corrupt", "vocab_size")),
        (lambda d: d.update(dtype="uint32"), ("dataset.corrupt", "uint32", "601")),
        (
            lambda d: d["tokenizer"].update(end_of_text=9999),
            ("dataset.corrupt", "end_of_text", "601"),
        ),
        (lambda d: d["tokenizer"].update(end_of_text=5), ("dataset.corrupt", "end_of_text")),
        (lambda d: d.update(splits={}), ("dataset.corrupt",)),
        (lambda d: d.update(subsets=[]), ("dataset.corrupt",)),
        (lambda d: d.update(documents=7), ("dataset.corrupt",)),
        (lambda d: d.update(seq_len=16), ("dataset.corrupt", "splits.train")),
        (lambda d: d["splits"]["val"].update(rows=1), ("dataset.corrupt", "splits.val")),
    ],
)
def test_edited_description(
    tiny_dataset: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    edit(data / "dataset.json", change)
    with raises_error(*message):
        DatasetInfo.load(data)


def _forget_a_subset(description: Any) -> None:
    description["subsets"].pop()
    for split in description["splits"].values():
        del split["subsets"]


def test_edits_that_only_the_rows_contradict(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    original = (data / "dataset.json").read_bytes()
    edit(data / "dataset.json", _forget_a_subset)
    with raises_error("shard.corrupt", "dataset.json"):
        list(eval_batches(data, "val", 4))
    with raises_error("verify.invalid_id"):
        verify(data)
    (data / "dataset.json").write_bytes(original)
    edit(data / "dataset.json", lambda d: d.update(vocab_size=700))
    with raises_error("verify.tokenizer", "vocab_size", "700", "601"):
        verify(data)
    (data / "dataset.json").write_bytes(original)
    edit(data / "dataset.json", lambda d: d["splits"]["val"].update(bytes_of_text=1))
    with raises_error("verify.totals", "dataset.json"):
        verify(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: shard.pop("samples"),
        lambda shard: shard.pop("column_names"),
        lambda shard: shard["raw_data"].update(hashes={}),
        lambda shard: shard.update(samples=-1),
    ],
)
def test_edited_index(tiny_dataset: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    edit(data / "train/index.json", lambda index: change(index["shards"][0]))
    for use in (stream, verify):
        with raises_error("dataset.corrupt", "train/index.json"):
            use(data)


def test_columns_of_another_row_length(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    wide = ["int", "int", "ndarray:uint16", "ndarray:uint16:65"]
    edit(data / "train/index.json", lambda i: i["shards"][0].update(column_encodings=wide))
    with raises_error("dataset.corrupt", "seq_len", "dataset.json"):
        stream(data)


def test_ids_beyond_the_vocabulary(tiny_dataset: Path, tmp_path: Path) -> None:
    data = corrupt_copy(tiny_dataset, tmp_path)
    shard = data / "train/shard.00000.mds"
    content = shard.read_bytes()
    everything = len(ShardReader(data / "train"))
    for size, message in [(20, ("shard.corrupt",)), (200, ("shard.corrupt",))]:
        shard.write_bytes(content[:-size] + b"\xff" * size)
        with raises_error(*message):
            stream(data, everything, everything).microbatches(0, 0, 1)
