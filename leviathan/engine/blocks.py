"""Compilation and activation checkpointing of the decoder blocks, for both engines."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from leviathan.config.schema import EngineConfig
from leviathan.model.transformer import CausalLM


def prepare_blocks(model: CausalLM, engine: EngineConfig) -> None:
    """Applies `torch.compile` and activation checkpointing to the blocks, as configured.

    Only `forward` is replaced: parameter names are unchanged, and the hooks that an engine
    registers on a block (gathering its weights) run outside both.
    """
    for block in model.model.layers:
        if engine.compile:
            block.forward = torch.compile(block.forward)
        if engine.activation_checkpointing:
            # Blocks use no random numbers.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
