"""LEV's scale at step 0 and its precision; test_oracle.py compares values and gradients."""

import math

import pytest
import torch

from leviathan.model.embeddings import build_embedding


@pytest.mark.parametrize("wanted", [0.02, 0.5])
def test_embedding_init_std_is_met(make_model, wanted):
    table = make_model(lev={"embedding_init_std": wanted}).model.embed_tokens.materialize()
    assert float(table.std()) == pytest.approx(wanted, rel=0.01)


def test_embedding_init_std_null_leaves_the_published_values(make_model):
    lev = make_model(lev={"embedding_init_std": None}).model.embed_tokens
    assert lev.out_weight.std().item() == pytest.approx(0.02 / math.sqrt(2), rel=0.2)
    scaled = make_model().model.embed_tokens
    ratio = scaled.out_weight / lev.out_weight
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))
    assert scaled.codebooks.equal(lev.codebooks)


def test_init_of_the_papers_shape():
    """E has std about 0.23 and a mean cosine of 0.62 between tokens, as LEV is published."""
    from leviathan.config.run import ModelConfig
    from leviathan.model.init import draw_values

    config = ModelConfig.model_validate(
        {"d_model": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 200_376}
        | {"embedding": {"kind": "leviathan", "embedding_init_std": None}}
    )
    lev = build_embedding(config)
    with torch.no_grad():
        for name, how in lev.init_spec(config).items():
            parameter = lev.get_parameter(name)
            parameter.copy_(draw_values(name, parameter.shape, how, seed=1))
        rows = lev.vectors(torch.arange(0, 200_376, 2003))
    unit = torch.nn.functional.normalize(rows, dim=-1)
    cosine = (unit @ unit.T).fill_diagonal_(0).sum() / (len(rows) * (len(rows) - 1))
    assert float(rows.std()) == pytest.approx(0.23, abs=0.03)
    assert float(cosine) == pytest.approx(0.62, abs=0.06)


def test_bf16_parameters_accumulate_in_fp32(make_model):
    lev = make_model().model.embed_tokens.bfloat16()
    ids = torch.arange(96)[None]
    low = lev(ids)
    assert low.dtype == torch.bfloat16
    # The same rounded parameters in fp32: only the result's own rounding may differ.
    torch.testing.assert_close(low, lev.float()(ids).bfloat16(), rtol=0, atol=0)
    low = lev.bfloat16()(ids)
    low.float().square().sum().backward()
    for name, parameter in lev.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
