"""The published parameter totals, to the digit, and closed forms against built models."""

from pathlib import Path

import pytest
import torch

from leviathan.config.embeddings import KINDS
from leviathan.config.load import load_config
from leviathan.config.run import ModelConfig, ModelFile
from leviathan.estimate.params import count_params
from leviathan.model.embeddings import build_embedding
from leviathan.model.transformer import CausalLM

CONFIGS = Path(__file__).parents[3] / "configs"

PUBLISHED = {
    ("200m", "tied"): 206_899_840,
    ("200m", "untied"): 335_140_480,
    ("200m", "leviathan"): 208_432_896,
    ("400m", "tied"): 406_537_216,
    ("400m", "untied"): 611_722_240,
    ("400m", "leviathan"): 408_266_880,
    ("1.2b", "tied"): 1_215_727_616,
    ("1.2b", "untied"): 1_626_097_664,
    ("1.2b", "leviathan"): 1_217_981_568,
    ("v1_60m", "tied"): 57_591_040,
    ("v1_60m", "leviathan_v1"): 59_891_456,
    ("v1_109m_dense", "untied"): 108_887_296,
    ("v1_109m_leviathan", "leviathan_v1"): 108_149_504,
    ("v1_421m_dense", "untied"): 421_042_944,
    ("v1_421m_leviathan", "leviathan_v1"): 420_801_792,
}
DEFAULTS = {"200m": "leviathan", "400m": "leviathan", "1.2b": "leviathan", "v1_60m": "tied"}


def preset(name: str, *changes: str) -> ModelConfig:
    return load_config(CONFIGS / "model" / f"{name}.yaml", changes, ModelFile).model


def of_kind(name: str, kind: str, **fields) -> ModelConfig:
    changes = [f"model.embedding.{field}={value}" for field, value in fields.items()]
    return preset(name, f"model.embedding.kind={kind}", *changes)


def numel(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("name", "kind"), PUBLISHED)
def test_published_totals(name: str, kind: str):
    config = of_kind(name, kind)
    counted = count_params(config)
    assert counted.total == PUBLISHED[name, kind]
    assert counted.total == counted.input_embedding + counted.output_head + counted.body
    with torch.device("meta"):
        model = CausalLM(config)
    assert numel(model) == counted.total
    assert numel(model.model.embed_tokens) == counted.input_embedding


@pytest.mark.parametrize(("name", "kind"), PUBLISHED)
def test_a_preset_is_of_the_kind_its_name_says(name: str, kind: str):
    assert preset(name).embedding.kind == DEFAULTS.get(name, kind)


@pytest.mark.parametrize(
    ("d_model", "count"), [(256, 2_300_416), (512, 2_464_256), (768, 2_628_096)]
)
def test_counts_of_the_first_version(d_model: int, count: int):
    config = preset("v1_60m", "model.embedding.kind=leviathan_v1", f"model.d_model={d_model}")
    assert count_params(config).input_embedding == count


@pytest.mark.parametrize("d_model", [640, 1024, 2048])
def test_lev_is_a_constant_and_512_per_unit_of_width(d_model: int):
    config = of_kind("400m", "leviathan").model_copy(update={"d_model": d_model})
    assert count_params(config).input_embedding == 1_205_376 + 512 * d_model


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_an_uneven_shape(kind: str):
    config = ModelConfig(
        d_model=48,
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        d_ff=100,
        vocab_size=301,
        padded_vocab_size=320,
        embedding={"kind": kind},  # pyright: ignore[reportArgumentType]
    )
    model, counted = CausalLM(config), count_params(config)
    assert numel(model) == counted.total
    assert numel(model.model.layers) + numel(model.model.norm) == counted.body


def test_flops_of_a_tied_model_by_hand():
    counted = count_params(of_kind("400m", "tied"))
    products = 12 * 16 * 1024**2 + 200_376 * 1024
    attention = 12 * 2 * 512 * 1024
    assert counted.flops_per_token == 6 * (products + attention)


def test_flops_that_torch_counts():
    """torch's own counter sees the matrix products of one forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    config = of_kind("400m", "tied").model_copy(
        update={"d_model": 64, "d_ff": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2}
        | {"seq_len": 32, "vocab_size": 300, "padded_vocab_size": 320}
    )
    model = CausalLM(config)
    ids = torch.randint(0, 300, (2, 32))
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(ids, ids).backward()
    assert counter.get_total_flops() == count_params(config).flops_per_token * ids.numel()


def test_leviathan_costs_little_more_than_tied():
    ratio = count_params(of_kind("1.2b", "leviathan")).flops_per_token / (
        count_params(of_kind("1.2b", "tied")).flops_per_token
    )
    assert 1.001 < ratio < 1.003  # the paper prints +0.26 %, without saying what it counts


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "leviathan" not in kind])
def test_flops_of_a_kind_that_torch_counts(kind: str, make_config):
    """torch's counter sees the embedding's matrix products over distinct ids, forward."""
    from torch.utils.flop_counter import FlopCounterMode

    config = make_config(kind)
    embedding = build_embedding(config)
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        embedding(torch.arange(80)[None])
    assert counter.get_total_flops() == 2 * 80 * config.embedding.multiply_adds(config.d_model)


@pytest.mark.parametrize("name", ["gpt2", "cl100k"])
def test_vocabulary_experiment(name: str):
    config = preset(f"400m_{name}")
    vocabulary = {"gpt2": 50_257, "cl100k": 100_277}[name]
    assert config.vocab_size == config.padded_vocab_size == vocabulary
    assert config.d_model == 1024
    base = {"gpt2": 37, "cl100k": 47}[name]
    assert config.embedding.base == base
    assert count_params(config).input_embedding == 1_205_376 + 512 * 1024 - 3 * 128 * (59 - base)
