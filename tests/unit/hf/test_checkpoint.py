"""Export of a checkpoint on disk: the model, its tokenizer and the run's facts come from there."""

import json

import pytest
import torch
from errors import raises_error

from leviathan.checkpoint.dcp import FlatShard, save_shards
from leviathan.checkpoint.store import SaveFuture, save_checkpoint
from leviathan.config.run import RunConfig
from leviathan.data.tokenizer import load_tokenizer
from leviathan.hf.export import export
from leviathan.hf.tokenizer import read_llama_tokenizer
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.parallel.launch_env import free_port, read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh


@pytest.fixture
def run(tmp_path, tiny_tokenizer, monkeypatch, request) -> RunConfig:
    """A run with one checkpoint, written by a world of one rank."""
    tokenizer = load_tokenizer(tiny_tokenizer)
    tokenizer.save(tmp_path / "data")
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "seq_len": 32}
    vocabulary = {"vocab_size": tokenizer.vocab_size, "padded_vocab_size": 640}
    foreign = {}
    if end := getattr(request, "param", None):
        form = {"kind": "mds_tokens", "tokenizer": str(tiny_tokenizer), "end_of_text": end}
        foreign = {"format": form}
    lev = {"kind": "leviathan", "d_seed": 8, "heads": 2, "knots": 5, "rank": 4}
    config = RunConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "data": {"path": str(tmp_path / "data"), **foreign},
            "model": {**shape, **vocabulary, "embedding": lev},
            "train": {"steps": 9, "global_batch_size": 2, "micro_batch_size": 1},
        }
    )
    settings = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    model = CausalLM(config.model)
    init_weights(model, config.model, seed=11)
    slices = [
        FlatShard(f"model.{name}", tuple(p.shape), 0, p.detach().view(-1))
        for name, p in model.named_parameters()
    ]
    mesh = init_mesh(read_launch_env(), tp=1)
    try:
        state = {"step": 9, "tokens": 576, "data_fingerprint": "f00d"}
        save_checkpoint(
            config, mesh, state, lambda at: SaveFuture(lambda: save_shards(slices, at), False)
        ).wait()
    finally:
        leave_mesh()
    return config


@pytest.mark.parametrize("run", [5], indirect=True)
def test_another_converter_s_end_of_text_is_the_export_s(run, tmp_path):
    """Documents that end with an ordinary id, which generation and scoring must use."""
    from transformers import AutoTokenizer

    out = tmp_path / "llama"
    export(run.run_dir, out, verify=True, add_bos=True)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((out / file).read_text())["eos_token_id"] == 5
    assert AutoTokenizer.from_pretrained(out)("def").input_ids[0] == 5
    assert "ended with the id 5" in (out / "README.md").read_text()
    tokenizer = read_llama_tokenizer(out)
    assert (tokenizer.end_of_text, tokenizer.prefix_token) == (5, 5)


def test_checkpoint_to_llama(run, tmp_path):
    from safetensors.torch import load_file

    measured = run.run_dir / "evaluation" / "step-00000009" / "perplexity.json"
    measured.parent.mkdir(parents=True)
    measured.write_text(json.dumps({"nats_per_token": 6.4321, "perplexity": 621.5}))
    result = export(run.run_dir, tmp_path / "llama", verify=True)
    assert result["max_abs_difference"] <= 1e-4

    model = CausalLM(run.model)
    init_weights(model, run.model, seed=11)
    state = load_file(tmp_path / "llama" / "model.safetensors")
    assert state["lm_head.weight"].equal(model.lm_head.weight[:601])
    torch.testing.assert_close(
        state["model.embed_tokens.weight"], model.model.embed_tokens.materialize()[:601]
    )
    card = (tmp_path / "llama" / "README.md").read_text()
    for fact in (
        "| Training steps | 9 |",
        "| Training tokens | 576 |",
        "| Dataset fingerprint | f00d |",
        "| Validation loss, nats per token | 6.4321 |",
    ):
        assert fact in card


def test_no_checkpoint(tmp_path):
    with raises_error("checkpoint.not_found", "nowhere"):
        export(tmp_path / "nowhere", tmp_path / "out")
    assert not list(tmp_path.iterdir())
