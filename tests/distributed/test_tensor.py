"""Tensor parallelism on two ranks compared with the unsharded model: all kinds, all LEV modes."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from leviathan.config.embeddings import KINDS
from leviathan.config.run import ModelConfig
from leviathan.data.loader import IGNORE
from leviathan.errors import ConfigError
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.parallel.tensor_parallel import apply_tp

LEV = {"d_seed": 8, "heads": 2, "knots": 5, "rank": 4}
CASES = {kind: {"kind": kind} for kind in KINDS}
CASES["leviathan_v1"] |= {"d_seed": 8, "modes": 2, "knots": 5, "rank": 4}
CASES["factored_mlp"] |= {"d_seed": 8}
for matched in ("albert", "flat_mlp", "factored_mlp"):
    CASES[matched] |= {"target_params": 3000}
del CASES["leviathan"]
for mode in ("replicated", "ids", "heads"):
    CASES[f"leviathan, {mode}"] = {"kind": "leviathan", "tp_mode": mode, **LEV}

# in float64, so that differences are errors, not rounding; scores are rounded to fp32 (6e-8)
TOLERANCE = 1e-6


def model(embedding, **shape):
    """96 rows for 46 ids: on the second of two ranks all of the vocabulary is padding."""
    config = ModelConfig.model_validate(
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "seq_len": 16}
        | {"vocab_size": 46, "padded_vocab_size": 96, "embedding": embedding}
        | shape
    )
    built = CausalLM(config)
    init_weights(built, config, seed=1)
    built.lm_head.z_loss = 0.01
    return built.double()


def far(found, wanted):
    """The largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def differences(embedding, **shape):
    """Differences of loss, scores, logits, table and each gradient to the unsharded model."""
    whole, cut = model(embedding, **shape), model(embedding, **shape)
    layout = apply_tp(cut, dist.group.WORLD)
    ids = (torch.arange(45).view(3, 15) * 7) % whole.config.vocab_size
    targets = ids.roll(-1, 1)
    targets[1, 3:9] = IGNORE
    losses = [m(ids, targets) for m in (whole, cut)]
    for loss in losses:
        loss.backward()
    off = {"loss": far(losses[1].detach(), losses[0].detach())}
    layout.sync_replicated_grads([(name, p.grad) for name, p in cut.named_parameters()])
    expected = dict(whole.named_parameters())
    for name, parameter in cut.named_parameters():
        assert parameter.grad is not None, name
        wanted = expected[name].grad
        if shard := layout.shard(name):
            wanted = wanted.chunk(dist.get_world_size(), shard.dim)[dist.get_rank()]
        off[f"gradient of {name}"] = far(parameter.grad, wanted)
    scores = [m.score(ids, targets) for m in (whole, cut)]
    off["nll"] = far(scores[1].nll, scores[0].nll)
    off["greedy"] = float((scores[1].is_greedy != scores[0].is_greedy).sum())
    real = slice(0, whole.config.vocab_size)
    logits = [m.logits(ids) for m in (whole, cut)]
    off["logits"] = far(logits[1][..., real], logits[0][..., real])
    off["padding"] = float(torch.isfinite(logits[1][..., real.stop :]).sum())
    off["table"] = far(*(m.model.embed_tokens.materialize() for m in (cut, whole)))
    return off, sum(layout.shard(name) is not None for name in expected), len(expected)


def refusal(**shape):
    with pytest.raises(ConfigError) as caught:
        apply_tp(model({"kind": "untied"}, **shape), dist.group.WORLD)
    return str(caught.value)


def on_a_rank():
    dist.init_process_group("gloo")
    try:
        results = {name: differences(embedding) for name, embedding in CASES.items()}
        results["real ids on both"] = differences({"kind": "tied"}, vocab_size=90)
        return results, refusal(padded_vocab_size=95)
    finally:
        dist.destroy_process_group()


def test_all_kinds_give_the_whole_models_loss_gradients_and_scores():
    for results, refused in run_ranks(on_a_rank, 2):
        assert results.keys() == CASES.keys() | {"real ids on both"}
        for name, (off, cut, parameters) in results.items():
            wrong = {what: value for what, value in off.items() if not value <= TOLERANCE}
            assert not wrong, (name, wrong)
            assert cut >= 7 * 2, (name, cut, parameters)  # seven matrices a layer at least
        assert "parallel.tp=2 does not divide dimension 0 of model.embed_tokens.weight" in refused
