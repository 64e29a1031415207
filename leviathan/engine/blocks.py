"""What both engines may do to the decoder's blocks before they take the model over."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from leviathan.config.schema import EngineConfig
from leviathan.model.transformer import CausalLM


def prepare_blocks(model: CausalLM, engine: EngineConfig) -> None:
    """Compiles the blocks and has them recompute their activations, where that is wanted.

    Only their `forward` is replaced: names stay, and what an engine hooks onto a block (gathering
    its weights) goes around both.
    """
    for block in model.model.layers:
        if engine.compile:
            block.forward = torch.compile(block.forward)
        if engine.activation_checkpointing:
            # Nothing in a block is random.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
