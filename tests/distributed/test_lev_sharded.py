"""LEV under FSDP2 and activation checkpointing on two ranks, compared with an unsharded model."""

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from leviathan.config.run import ModelConfig
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM

KINDS = ("leviathan", "leviathan_v1")
# fp32, summed over two ranks instead of in one batch; seen: 4e-7 of the largest gradient.
TOLERANCE = 5e-6


def model(kind):
    config = ModelConfig.model_validate(
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "seq_len": 16}
        | {"vocab_size": 90, "padded_vocab_size": 96}
        | {"embedding": {"kind": kind, "d_seed": 8, "knots": 5, "rank": 4}}
    )
    built = CausalLM(config)
    init_weights(built, config, seed=1)
    return built


def furthest(kind):
    """Largest difference of a gradient, relative to the largest of its tensor, by name."""
    whole, sharded = model(kind), model(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [sharded.model.embed_tokens, *sharded.model.layers]:
        checkpoint(block)
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids = torch.arange(96).view(6, 16) % 90
    whole(ids, ids).backward()
    mine = ids[dist.get_rank() :: dist.get_world_size()]
    sharded(mine, mine).backward()
    expected = dict(whole.named_parameters())
    differences = {}
    for name, parameter in sharded.named_parameters():
        # FSDP averages over ranks; the loss is a sum.
        found = parameter.grad.full_tensor() * dist.get_world_size()
        wanted = expected[name].grad
        differences[name] = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return differences


def on_a_rank():
    dist.init_process_group("gloo")
    try:
        return {kind: furthest(kind) for kind in KINDS}
    finally:
        dist.destroy_process_group()


def test_gradients_under_fsdp2_and_activation_checkpointing_are_those_of_the_whole_model():
    for result in run_ranks(on_a_rank, 2):
        for kind, differences in result.items():
            assert any("embed_tokens" in name for name in differences)
            off = {name: value for name, value in differences.items() if value > TOLERANCE}
            assert not off, (kind, off)
