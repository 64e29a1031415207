"""A Llama directory back to a native checkpoint without loss."""

import json
import shutil

import pytest
import torch
from errors import raises_error

from leviathan.checkpoint.store import load_model, resolve_valid
from leviathan.config.embeddings import KINDS
from leviathan.config.run import ModelConfig
from leviathan.data.tokenizer import load_tokenizer
from leviathan.hf.export import export, export_model
from leviathan.hf.importer import import_llama
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM


def make(kind: str, tokenizer) -> tuple[CausalLM, ModelConfig]:
    config = ModelConfig.model_validate(
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "seq_len": 24}
        | {"vocab_size": tokenizer.vocab_size, "padded_vocab_size": 640, "norm_eps": 1e-4}
        | {"rope_theta": 5000.0, "embedding": {"kind": kind}}
    )
    model = CausalLM(config)
    init_weights(model, config, seed=3)
    return model, config


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "leviathan_v1"])
def test_there_and_back(tiny_tokenizer, tmp_path, kind):
    from safetensors.torch import load_file

    tokenizer = load_tokenizer(tiny_tokenizer)
    model, config = make(kind, tokenizer)
    first, run, second = tmp_path / "first", tmp_path / "run", tmp_path / "second"
    export_model(model, config, tokenizer, {}, first, shard_size="100KB")
    result = import_llama(first, run)
    assert result["kind"] == ("tied" if kind == "tied" else "untied")

    native, loaded, state = load_model(run)
    assert state["step"] == 0
    assert (loaded.model.rope_theta, loaded.model.norm_eps) == (5000.0, 1e-4)
    assert native.lm_head.tied == (kind == "tied")
    ids = torch.arange(48).view(2, 24) % tokenizer.vocab_size
    ours = model.logits(ids)[..., : tokenizer.vocab_size]
    torch.testing.assert_close(native.logits(ids), ours, atol=1e-4, rtol=0)
    again = load_tokenizer(resolve_valid(run))
    assert (again.fingerprint, again.name) == (tokenizer.fingerprint, tokenizer.name)

    # The second directory has the same weights as the first.
    export(run, second, verify=True)
    weights = {}
    for file in first.glob("*.safetensors"):
        weights |= load_file(file)
    written = load_file(second / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(written[name].equal(value) for name, value in weights.items())
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_tokenizer_with_another_end_and_gaps(shared, tmp_path, monkeypatch):
    """o200k, whose unused ids have names in the export only."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tiktoken_cache"))
    tokenizer = load_tokenizer("o200k_base")
    config = ModelConfig.model_validate(
        {"d_model": 8, "n_layers": 1, "n_heads": 2, "seq_len": 8, "vocab_size": 200_019}
        | {"embedding": {"kind": "tied"}}
    )
    model = CausalLM(config)
    init_weights(model, config, seed=3)
    export_model(model, config, tokenizer, {}, tmp_path / "out")
    import_llama(tmp_path / "out", tmp_path / "run")
    again = load_tokenizer(resolve_valid(tmp_path / "run"))
    assert again.fingerprint == tokenizer.fingerprint


def test_what_cannot_be_imported(tiny_tokenizer, tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizer)
    model, config = make("tied", tokenizer)
    export_model(model, config, tokenizer, {}, tmp_path / "out")
    import_llama(tmp_path / "out", tmp_path / "run")
    with raises_error("import.not_empty", tmp_path / "run"):
        import_llama(tmp_path / "out", tmp_path / "run")
    with raises_error("import.not_found", tmp_path / "nowhere", "config.json"):
        import_llama(tmp_path / "nowhere", tmp_path / "other")
    shutil.copytree(tmp_path / "out", tmp_path / "part")
    (tmp_path / "part" / "model.safetensors").unlink()
    with raises_error("import.unreadable", "model.safetensors"):
        import_llama(tmp_path / "part", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    for key, value in {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "partial_rotary_factor": 0.5,
        "sliding_window": 16,
        "attention_bias": True,
        "quantization_config": {"quant_method": "gptq"},
        "model_type": "mistral",
    }.items():
        settings = json.loads((tmp_path / "out" / "config.json").read_text()) | {key: value}
        (tmp_path / "part" / "config.json").write_text(json.dumps(settings))
        with raises_error("import.unsupported_config", f"config.json: {key}"):
            import_llama(tmp_path / "part", tmp_path / "other")
