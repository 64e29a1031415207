"""Whose weights a run may begin with: equal shapes do not make them the same function."""

import json
import math
import shutil

import pytest
import torch
from errors import raises_error
from torch import nn

from leviathan.checkpoint.dcp import save_shards
from leviathan.checkpoint.layout import step_dir
from leviathan.checkpoint.store import (
    SaveFuture,
    check_init_from,
    load_model,
    save_checkpoint,
    weight_shards,
)
from leviathan.config.run import RunConfig
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import CheckpointError, ConfigError
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.preflight.checks import Report, check_first_weights
from leviathan.train.loop import first_weights, new_model

LEVIATHAN = {"kind": "leviathan", "d_seed": 4, "heads": 2, "knots": 4, "rank": 3}


def run_config(dataset, run_dir, embedding=None, **changes):
    model = {"d_model": 16, "n_layers": 1, "n_heads": 4, "vocab_size": 601, "seq_len": 32}
    return RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "data": {"path": dataset},
            "model": {**model, "embedding": embedding or {"kind": "tied"}, **changes},
            "train": {"steps": 9, "global_batch_size": 2, "micro_batch_size": 1},
        }
    )


def second(config, **changes):
    """Another run, with a changed model, that begins with the weights of the first."""
    data = config.model_dump()
    embedding = {**data["model"]["embedding"], **changes.pop("embedding", {})}
    data["model"] |= {**changes, "embedding": embedding}
    data |= {"run_dir": config.run_dir.with_name("second"), "init_from": config.run_dir}
    return RunConfig.model_validate(data)


@pytest.fixture
def save(mesh):
    def written(config):
        model = CausalLM(config.model)
        init_weights(model, config.model, seed=3)

        def tensors(folder):
            return SaveFuture(lambda: save_shards(weight_shards(model), folder), False)

        save_checkpoint(config, mesh, {"step": 3}, tensors).wait()
        return model

    return written


def test_another_run_begins_with_the_weights_and_nothing_else(tiny_dataset, tmp_path, save, mesh):
    config = run_config(tiny_dataset, tmp_path / "run")
    model, other = save(config), second(config, seq_len=16)
    source = first_weights(other, mesh)
    assert source == step_dir(config.run_dir, 3)
    assert check_init_from(other, source) == []
    begun = new_model(other, source)
    for name, parameter in model.named_parameters():
        assert torch.equal(begun.get_parameter(name), parameter), name
    assert begun.training
    assert first_weights(config, mesh) is None
    (source / "state.json").unlink()
    with raises_error("checkpoint.corrupt", "state.json: missing", error=CheckpointError):
        first_weights(other, mesh)


@pytest.mark.parametrize(
    ("embedding", "changes", "key"),
    [
        ({"kind": "tied"}, {"n_heads": 2, "n_kv_heads": 2}, "model.n_heads"),
        ({"kind": "tied"}, {"n_kv_heads": 2}, "model.n_kv_heads"),
        ({"kind": "tied"}, {"embedding": {"kind": "untied"}}, "embedding.kind"),
        (LEVIATHAN, {"embedding": {"latent_scale": "inside"}}, r"latent_scale"),
        (LEVIATHAN, {"embedding": {"heads": 1, "rank": 6}}, "embedding.rank"),
        (
            {"kind": "binary_codes"},
            {"embedding": {"embedding_init_std": 0.5}},
            "embedding_init_std",
        ),
    ],
)
def test_another_function_of_the_same_weights_is_refused(
    tiny_dataset, tmp_path, save, mesh, embedding, changes, key
):
    config = run_config(tiny_dataset, tmp_path / "run", embedding)
    save(config)
    other = second(config, **changes)
    with raises_error("init_from.other_model", "step-00000003", key):
        first_weights(other, mesh)
    report = Report()
    with report.catching("init_from"):
        check_first_weights(report, other)
    assert report.level == "error"


def test_heads_with_equal_shapes_are_refused(tiny_dataset, tmp_path, save, mesh):
    """4 heads with 2 key-value heads and 2 with 1 have the same projections."""
    config = run_config(tiny_dataset, tmp_path / "run", n_kv_heads=2)
    save(config)
    with raises_error("init_from.other_model", "model.n_heads", "model.n_kv_heads"):
        first_weights(second(config, n_heads=2, n_kv_heads=1), mesh)


def test_rope_theta_and_norm_eps_are_warned_of(tiny_dataset, tmp_path, save, mesh, capfd):
    config = run_config(tiny_dataset, tmp_path / "run")
    save(config)
    other = second(config, rope_theta=500_000.0, norm_eps=1e-6)
    source = first_weights(other, mesh)
    assert source is not None
    shown = " ".join(capfd.readouterr().err.split())
    assert "model.rope_theta: 10000.0 in the checkpoint, 500000.0 here" in shown
    assert "model.norm_eps: 1e-05 in the checkpoint, 1e-06 here" in shown
    report = Report()
    check_first_weights(report, other)
    (row,) = report.findings
    assert row.level == "warning"
    assert "500000.0" in row.message
    assert "1e-06" in row.message


def test_initial_values_and_layouts_are_free(tiny_dataset, tmp_path, save, mesh):
    config = run_config(tiny_dataset, tmp_path / "run", LEVIATHAN)
    save(config)
    changes = {"embedding_init_std": 0.3, "spline_init_std": 0.2, "tp_mode": "replicated"}
    other = second(config, init_std=0.01, embedding=changes)
    assert check_init_from(other, step_dir(config.run_dir, 3)) == []


@pytest.fixture
def other_dataset(tiny_dataset, tmp_path):
    """The dataset with two ids exchanged, as another tokenizer of the same size would have it."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_dataset, folder)
    tokenizer = load_tokenizer(folder)
    ranks = dict(tokenizer.ranks)
    last, before = sorted(ranks, key=ranks.__getitem__)[-1:-3:-1]
    ranks[last], ranks[before] = ranks[before], ranks[last]
    encoding = tokenizer._encoding.__class__(
        "other",
        pat_str=tokenizer.pattern,
        mergeable_ranks=ranks,
        special_tokens=tokenizer.special_tokens,
    )
    Tokenizer(encoding).save(folder)
    return folder


def test_another_tokenizer_is_refused(tiny_dataset, other_dataset, tmp_path, save, mesh):
    config = run_config(tiny_dataset, tmp_path / "run")
    save(config)
    other = second(config).model_copy(
        update={"data": config.data.model_copy(update={"path": other_dataset})}
    )
    with raises_error("init_from.other_tokenizer", "tokenizer", "other", error=ConfigError):
        first_weights(other, mesh)


def test_another_split_pattern_is_warned_of(tiny_dataset, tmp_path, save):
    config = run_config(tiny_dataset, tmp_path / "run")
    save(config)
    source = step_dir(config.run_dir, 3)
    ours = load_tokenizer(source)
    special = {**ours.special_tokens, "<|pad|>": ours.vocab_size}
    encoding = ours._encoding.__class__(
        "more", pat_str=ours.pattern, mergeable_ranks=ours.ranks, special_tokens=special
    )
    Tokenizer(encoding).save(source)
    (warning,) = check_init_from(second(config), source)
    assert "more" in warning
    assert json.loads((source / "tokenizer.meta.json").read_text())["fingerprint"][:12] in warning


def test_weights_that_are_not_finite_are_refused(tiny_dataset, tmp_path, save, mesh, monkeypatch):
    config = run_config(tiny_dataset, tmp_path / "run")
    monkeypatch.setattr(CausalLM, "named_parameters", _poisoned(CausalLM.named_parameters))
    save(config)
    monkeypatch.undo()
    source = first_weights(second(config), mesh)
    for read in (lambda: new_model(second(config), source), lambda: load_model(config.run_dir)):
        with raises_error("checkpoint.not_finite", "model.model.norm.weight", "16"):
            read()


def _poisoned(named_parameters):
    def changed(model):
        for name, p in named_parameters(model):
            yield name, nn.Parameter(p * math.nan) if name == "model.norm.weight" else p

    return changed
