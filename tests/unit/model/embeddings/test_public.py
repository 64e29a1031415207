"""`from leviathan import LeviathanEmbedding`: what nn.Embedding's users expect of it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from errors import raises_error

import leviathan
from leviathan import LeviathanEmbedding

ROOT = Path(__file__).parents[4]
SMALL = {"d_seed": 8, "heads": 2, "knots": 5, "rank": 4}


def small(vocabulary: int = 96, width: int = 33, **fields) -> LeviathanEmbedding:
    return LeviathanEmbedding(vocabulary, width, **{"seed": 5, **SMALL, **fields})


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (2, 1, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint16])
def test_ids_of_any_shape_and_integer_dtype(shape, dtype):
    lev = small()
    ids = torch.randint(0, 96, shape).to(dtype)
    vectors = lev(ids)
    assert vectors.shape == (*shape, 33)
    torch.testing.assert_close(vectors, lev.materialize()[ids.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_that_are_no_integers(dtype):
    with pytest.raises(TypeError, match="token ids must be integers"):
        small()(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("wrong", [-1, 96])
def test_ids_outside(wrong):
    with pytest.raises(IndexError, match=r"outside the vocabulary \[0, 96\)"):
        small()(torch.tensor([wrong]))


def test_dtype_device_and_repr():
    lev = small(dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in lev.parameters()} == {torch.bfloat16}
    assert lev(torch.tensor([3])).dtype == torch.bfloat16
    assert lev.materialize(torch.float32).dtype == torch.float32
    assert repr(lev) == "LeviathanEmbedding(96, 33)"
    assert (lev.num_embeddings, lev.embedding_dim) == (96, 33)
    assert not hasattr(lev, "weight")
    assert {p.device.type for p in small(device="meta").parameters()} == {"meta"}
    with torch.device("meta"):
        assert {p.device.type for p in small(seed=None).parameters()} == {"meta"}


def test_the_global_seed_rules_unless_one_is_given():
    def table(**fields):
        return small(**fields).materialize()

    torch.manual_seed(1)
    one, two = table(seed=None), table(seed=None)
    torch.manual_seed(1)
    assert table(seed=None).equal(one)
    assert not two.equal(one)
    assert table(seed=3).equal(table(seed=3))
    assert float(one.std()) == pytest.approx(0.02, rel=0.01)


def test_parameters_are_those_of_a_native_checkpoint(make_model):
    native = make_model().model.embed_tokens
    lev = small(width=32)
    lev.load_state_dict(native.state_dict())
    assert lev.materialize().equal(native.materialize())


def test_defaults_are_the_papers():
    lev = LeviathanEmbedding(200_376, 1024, device="meta")
    assert sum(p.numel() for p in lev.parameters()) == 1_729_664


@pytest.mark.parametrize(
    ("arguments", "fields", "expected"),
    [
        ((96, 32), {"knot": 5}, ("config.invalid", "knots")),
        ((96, 32), {"knots": 1}, ("config.invalid", "knots", 2)),
        ((96, 32), {"base": 4}, ("embedding.invalid", 64, 96)),
        ((0, 32), {}, ("embedding.invalid", "num_embeddings")),
        ((96, 0), {}, ("embedding.invalid", "embedding_dim")),
    ],
)
def test_wrong_arguments(arguments, fields, expected):
    with raises_error(*expected, "LeviathanEmbedding"):
        LeviathanEmbedding(*arguments, **fields)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, leviathan; assert 'torch' not in sys.modules; leviathan.LeviathanEmbedding"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'Leviathan'"):
        leviathan.Leviathan  # noqa: B018


def test_example_trains_in_a_transformers_llama(capsys):
    spec = importlib.util.spec_from_file_location(
        "leviathan_in_llama", ROOT / "examples" / "leviathan_in_llama.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main(["--steps", "12"])
    assert losses[-1] < 0.8 * losses[0]
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split()[-1].rstrip(".")) < 1e-5

    llama = example.build(300)
    llama(input_ids=torch.arange(32)[None], labels=torch.arange(32)[None]).loss.backward()
    for name, parameter in llama.model.embed_tokens.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name
