"""Weights at step 0 are functions of the seed and the parameter's name."""

import subprocess
import sys

import pytest
import torch

from leviathan.config.embeddings import KINDS
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM

HASH = """
import hashlib, json, sys, torch
from leviathan.config.run import ModelConfig
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
torch.set_num_threads(int(sys.argv[2]))
config = ModelConfig.model_validate_json(sys.argv[1])
model = CausalLM(config)
init_weights(model, config, 5)
values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(hashlib.sha256(values).hexdigest())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_whatever_was_drawn_before(make_config, kind):
    config = make_config(kind)
    torch.manual_seed(1)
    one = CausalLM(config)
    init_weights(one, config, 7)
    torch.manual_seed(2)
    two = CausalLM(config)
    for _, parameter in reversed(list(two.named_parameters())):
        torch.nn.init.normal_(parameter)
    init_weights(two, config, 7)
    for (name, ours), theirs in zip(one.named_parameters(), two.parameters(), strict=True):
        assert ours.equal(theirs), name


def test_seeds_and_names_tell_parameters_apart(make_model):
    one, two = make_model(seed=1), make_model(seed=2)
    for (name, ours), theirs in zip(one.named_parameters(), two.parameters(), strict=True):
        constant = "norm" in name or name.endswith("bias")
        assert ours.equal(theirs) == constant, name
    layers = one.model.layers
    assert not layers[0].self_attn.q_proj.weight.equal(layers[1].self_attn.q_proj.weight)
    assert not layers[0].self_attn.q_proj.weight.equal(layers[0].self_attn.k_proj.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_share_their_body(make_model, kind):
    tied, other = make_model("tied"), dict(make_model(kind).named_parameters())
    for name, parameter in tied.named_parameters():
        if "embed_tokens" not in name:
            assert parameter.equal(other[name]), name


def test_a_deeper_model_keeps_the_lower_layers_draws(make_model):
    shallow, deep = make_model(n_layers=2), make_model(n_layers=4)
    assert shallow.model.layers[1].mlp.up_proj.weight.equal(deep.model.layers[1].mlp.up_proj.weight)


def test_scales(make_model):
    model = make_model("tied", d_model=128, vocab_size=1000, padded_vocab_size=1000, n_layers=8)
    block = model.model.layers[3]
    for matrix, std in (
        (model.model.embed_tokens.weight, 0.02),
        (block.self_attn.q_proj.weight, 0.02),
        (block.mlp.up_proj.weight, 0.02),
        (block.self_attn.o_proj.weight, 0.02 / 4),
        (block.mlp.down_proj.weight, 0.02 / 4),
    ):
        assert matrix.std().item() == pytest.approx(std, rel=0.05)
        assert abs(matrix.mean().item()) < std / 20
    assert bool((block.input_layernorm.weight == 1).all())
    assert bool((model.model.norm.weight == 1).all())


def test_the_same_in_another_process_with_other_threads(make_config):
    config = make_config("leviathan").model_dump_json()
    hashes = {
        subprocess.run(
            [sys.executable, "-c", HASH, config, threads],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(hashes) == 1
