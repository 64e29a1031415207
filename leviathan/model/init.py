"""Initial weights: each parameter is a function of the seed and its name.

They are therefore the same for any device, world size, engine and construction order, and the arms
of a comparison have identical values in all parameters that they share.
"""

import hashlib
import math

import torch
from torch import Tensor

from leviathan.config.run import ModelConfig
from leviathan.model.embeddings.base import Normal
from leviathan.model.transformer import CausalLM

RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def draw_values(name: str, shape: torch.Size, how: Normal, seed: int) -> Tensor:
    """The initial fp32 value of the parameter `name`, on the CPU."""
    if how.std == 0:
        return torch.full(shape, how.mean)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(how.mean, how.std, generator=generator)


def init_rules(model: CausalLM, config: ModelConfig) -> dict[str, Normal]:
    """Initialization of every parameter of the model, by name."""
    embedding = {
        f"model.embed_tokens.{name}": how
        for name, how in model.model.embed_tokens.init_spec(config).items()
    }
    residual_std = config.init_std / math.sqrt(2 * config.n_layers)

    def rule(name: str) -> Normal:
        if name in embedding:
            return embedding[name]
        if name.endswith("norm.weight"):
            return Normal(mean=1.0)
        return Normal(residual_std if name.endswith(RESIDUAL_OUTPUTS) else config.init_std)

    return {name: rule(name) for name, _ in model.named_parameters()}


@torch.no_grad()
def init_weights(model: CausalLM, config: ModelConfig, seed: int) -> None:
    """Initializes every parameter in place, on any device and in any dtype.

    Backbone N(0, init_std²), residual outputs smaller by √(2·layers), norms one; the embedding as
    defined by its kind.
    """
    how = init_rules(model, config)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_values(name, parameter.shape, how[name], seed))
    model.model.embed_tokens.calibrate()
