"""Reads a Hugging Face Llama directory as a native model, without transformers."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leviathan.checkpoint.store import check_finite
from leviathan.config.run import ModelConfig
from leviathan.console import say
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import CheckpointError
from leviathan.hf.model_card import TokenizerNotes
from leviathan.hf.tokenizer import (
    ADDED_TOKENS,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    load_original,
    read_model_json,
)
from leviathan.model.transformer import CausalLM, meta_model

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
ARCHITECTURE = "LlamaForCausalLM"

# Keys of a Llama configuration without a counterpart here, and the values that do not change the
# model. The first value is the default.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "auto_map": (None,),  # would import code from the directory
    "is_decoder": (True, False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
_SHAPE_KEYS = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
}
_ROPE_KEYS = {"rope_type", "rope_theta"}
# Keys that change neither the output of the weights nor the ids of a text.
_NEUTRAL_KEYS = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",  # checked separately
    "attention_dropout",  # only in training
    "bos_token_id",  # see `check_llama_pair`
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "initializer_range",
    "model_type",  # checked separately
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def is_llama_folder(path: Path) -> bool:
    """Returns whether a directory has a `config.json`, as written by transformers."""
    return (Path(path) / CONFIG).is_file()


def read_llama_config(folder: Path) -> ModelConfig:
    """Reads config.json as a native model configuration.

    Raises:
        CheckpointError: config.json is corrupt, of another architecture, or uses features that
            native models do not support (scaled rotary positions, biases, other activations).
    """
    file = folder / CONFIG
    content = read_model_json(file)
    rope = content.get("rope_parameters") or {}  # used by transformers 5
    problems = []
    if content.get("model_type") != "llama":
        problems.append(f"model_type is {content.get('model_type')!r}, only llama can be read")
    problems += [
        f"{key} is {content[key]!r:.80}, native models support only {allowed[0]!r}"
        for key, allowed in _ONLY.items()
        if content.get(key, allowed[0]) not in allowed
    ]
    if content.get("architectures") not in (None, [ARCHITECTURE]):
        problems.append(f"architectures is {content['architectures']!r}, expected {[ARCHITECTURE]}")
    if rope.get("rope_type", "default") != "default" or rope.keys() - _ROPE_KEYS:
        problems.append(
            f"rope_parameters is {rope!r:.120}, native models do not support scaled positions"
        )
    thetas = {float(x) for x in (content.get("rope_theta"), rope.get("rope_theta")) if x}
    if len(thetas) > 1:
        problems.append(
            f"rope_theta is {content['rope_theta']} and, in rope_parameters, "
            f"{rope['rope_theta']}: remove the wrong one"
        )
    if problems:
        raise CheckpointError("import.unsupported_config", f"{file}: {'; '.join(problems)}")
    if unknown := sorted(content.keys() - _ONLY.keys() - _SHAPE_KEYS - _NEUTRAL_KEYS):
        say(f"warning: {file}: unknown keys are ignored: {', '.join(unknown)}", style="yellow")
    try:
        heads = content["num_attention_heads"]
        if content.get("head_dim") not in (None, content["hidden_size"] // heads):
            raise CheckpointError(
                "import.unsupported_config",
                f"{file}: head_dim is {content['head_dim']}; native models have hidden_size / "
                f"num_attention_heads = {content['hidden_size'] // heads}",
            )
        return ModelConfig.model_validate(
            {
                "d_model": content["hidden_size"],
                "n_layers": content["num_hidden_layers"],
                "n_heads": heads,
                "n_kv_heads": content.get("num_key_value_heads") or heads,
                "d_ff": content["intermediate_size"],
                "seq_len": content.get("max_position_embeddings", 2048),
                "vocab_size": content["vocab_size"],
                "rope_theta": float(content.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
                "norm_eps": float(content.get("rms_norm_eps", 1e-6)),
                "embedding": {"kind": "tied" if content.get("tie_word_embeddings") else "untied"},
            }
        )
    except (KeyError, TypeError, ZeroDivisionError, ValidationError) as error:
        raise CheckpointError(
            "import.unsupported_config", f"{file}: not a valid Llama configuration ({error!r:.200})"
        ) from None


def check_llama_pair(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Checks that tokenizer and model are compatible.

    Prints a warning if the model's files and the tokenizer have different special tokens: scoring
    and generation use those of the tokenizer, as lm-eval's `hf` model does for its prefix.

    Raises:
        CheckpointError: the tokenizer has more ids than the model.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            "import.tokenizer_mismatch",
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids, but the model only "
            f"{config.vocab_size:,}: use the tokenizer of this model",
        )
    own = {"bos_token_id": tokenizer.prefix_token, "eos_token_id": tokenizer.end_of_text}
    for name in (CONFIG, GENERATION):
        content = read_model_json(folder / name) if (folder / name).is_file() else {}
        for key, id in own.items():
            if content.get(key) not in (None, id, [id]):
                say(
                    f"warning: {folder / name}: {key} is {content[key]}, but the tokenizer has "
                    f"{id}; using {id}",
                    style="yellow",
                )


def read_llama_model(folder: Path, config: ModelConfig) -> CausalLM:
    """Reads the weights in fp32 on the CPU; the model is in evaluation mode.

    Raises:
        CheckpointError: files or tensors are missing, corrupt, of other shapes or not finite.
    """
    model = meta_model(config)
    found = {name: value.float() for name, value in _read_weights(folder).items()}
    if config.embedding.kind == "tied":
        head = found.pop("lm_head.weight", None)  # some writers store it twice
        if head is not None and not head.equal(found.get("model.embed_tokens.weight", head)):
            raise CheckpointError(
                "import.contradictory_weights",
                f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                "model.embed_tokens.weight: correct config.json",
            )
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(
            "import.missing_tensor",
            f"{folder}: tensor {missing[0]} is missing ({len(missing)} missing in total)",
        )
    for name in sorted(found):
        if name.endswith("rotary_emb.inv_freq"):
            del found[name]  # stored by old versions; it follows from rope_theta
        elif name not in expected:
            raise CheckpointError(
                "import.unknown_tensor",
                f"{folder}: tensor {name}: not a weight of a native model",
            )
        elif tuple(found[name].shape) != expected[name]:
            raise CheckpointError(
                "import.wrong_shape",
                f"{folder}: tensor {name}: expected {expected[name]}, found "
                f"{tuple(found[name].shape)}; config.json does not match these weights",
            )
    check_finite(found, str(folder))
    model.load_state_dict(found, assign=True)
    if model.lm_head.tied:
        weight = model.model.embed_tokens.output_weight
        assert weight is not None
        model.lm_head.weight = weight
    return model.eval()


def _read_weights(folder: Path) -> dict[str, Tensor]:
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(read_model_json(folder / INDEX).get("weight_map", {}).values()))
    state: dict[str, Tensor] = {}
    for name in names:
        try:
            state |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "import.unreadable",
                f"{folder / name}: missing or corrupt ({error}); expected a safetensors file",
            ) from None
    return state


# ---------------------------------------------------------------- tokenizer files
# The native tokenizer of the checkpoint gives the same ids for ordinary text, but does not describe
# everything that a Hugging Face tokenizer does: special tokens in a text, tokens added around a
# text, the chat template. An export must preserve these.

FOLDER = "imported_tokenizer"  # inside the checkpoint
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    GENERATION,
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a directory
SPECIAL_IDS = "special_ids"  # key of state.json
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ImportedTokenizer:
    """The tokenizer files of an imported model.

    Attributes:
        folder: directory of the files.
        special_ids: bos_token_id, eos_token_id and pad_token_id of the imported config.json.
    """

    folder: Path
    special_ids: Mapping[str, Any]

    def notes(self, tokenizer: Tokenizer) -> TokenizerNotes:
        """Properties for the model card."""
        added = read_model_json(self.folder / TOKENIZER)["added_tokens"]
        names = {token["id"]: token["content"] for token in added}
        prefixed = load_original(self.folder).encode("a").ids[:1] == [tokenizer.prefix_token]
        splits = not read_model_json(self.folder / TOKENIZER_CONFIG).get(
            "split_special_tokens", False
        )
        return TokenizerNotes(
            tokenizer.end_of_text,
            tokenizer.prefix_token,
            names[tokenizer.prefix_token],
            adds_prefix=prefixed,
            imported=True,
            splits_special=splits,
        )

    def copy_to(self, folder: Path) -> None:
        """Copies the files into an export."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)


def keep_tokenizer(source: Path, checkpoint: Path) -> dict[str, Any]:
    """Copies tokenizer files into a checkpoint; returns entries for state.json."""
    kept = checkpoint / FOLDER
    kept.mkdir()
    for name in FILES:
        if (source / name).is_file():
            (kept / name).write_bytes((source / name).read_bytes())
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, kept / TEMPLATES)
    config = read_model_json(source / CONFIG)
    return {SPECIAL_IDS: {key: config[key] for key in _ID_KEYS if key in config}}


def kept_tokenizer(checkpoint: Path, state: Mapping[str, Any]) -> ImportedTokenizer | None:
    """The stored tokenizer files of an imported checkpoint; None for other checkpoints."""
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        return None
    return ImportedTokenizer(folder, state.get(SPECIAL_IDS) or {})
