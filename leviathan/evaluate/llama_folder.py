"""A Hugging Face Llama folder as a native model of kind tied or untied, without transformers."""

import json
from pathlib import Path
from typing import Any

import tiktoken
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leviathan.config.schema import ModelConfig
from leviathan.data.tokenizer import END_OF_TEXT, Tokenizer
from leviathan.errors import CheckpointError
from leviathan.model.transformer import CausalLM

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MARKER = "export.json"  # what this project's own export says of itself
UNUSED = "<|unused_{}|>"  # what an export calls an id that its tokenizer leaves unused

# What a Llama configuration may say that this model has no counterpart for, and what it must say.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}


def is_llama_folder(path: Path) -> bool:
    """True for a folder with a `config.json` as transformers writes it."""
    return (Path(path) / CONFIG).is_file()


def read_llama_config(folder: Path) -> ModelConfig:
    """The shape of the model, as this project says it.

    Raises:
        CheckpointError: config.json is damaged, of another architecture, or asks for what native
            models do not have (scaled rotary positions, biases, other activations).
    """
    file = folder / CONFIG
    said = _read_json(file)
    if said.get("model_type") != "llama":
        raise CheckpointError(
            f"{file}: model_type is {said.get('model_type')!r}; only llama can be read"
        )
    rope = said.get("rope_parameters") or {}  # where transformers 5 puts it
    if rope.get("rope_type", "default") != "default":
        said["rope_scaling"] = rope
    defaults = {"hidden_act": "silu"}
    for key, allowed in _ONLY.items():
        if said.get(key, defaults.get(key)) not in allowed:
            raise CheckpointError(
                f"{file}: {key} is {said[key]!r}; native models know only {allowed[0]!r}"
            )
    try:
        heads = said["num_attention_heads"]
        if said.get("head_dim") not in (None, said["hidden_size"] // heads):
            raise CheckpointError(
                f"{file}: head_dim is {said['head_dim']}; native models have hidden_size / "
                f"num_attention_heads = {said['hidden_size'] // heads}"
            )
        return ModelConfig.model_validate(
            {
                "d_model": said["hidden_size"],
                "n_layers": said["num_hidden_layers"],
                "n_heads": heads,
                "n_kv_heads": said.get("num_key_value_heads") or heads,
                "d_ff": said["intermediate_size"],
                "seq_len": said.get("max_position_embeddings", 2048),
                "vocab_size": said["vocab_size"],
                "rope_theta": float(said.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
                "norm_eps": float(said.get("rms_norm_eps", 1e-6)),
                "embedding": {"kind": "tied" if said.get("tie_word_embeddings") else "untied"},
            }
        )
    except (KeyError, TypeError, ZeroDivisionError, ValidationError) as error:
        raise CheckpointError(f"{file}: no usable Llama configuration ({error!r:.200})") from None


def read_llama_model(folder: Path, config: ModelConfig) -> CausalLM:
    """The weights in fp32 on the CPU, in evaluation mode.

    Raises:
        CheckpointError: files or tensors are missing, damaged or of other shapes.
    """
    with torch.device("meta"):
        model = CausalLM(config)
    found = {name: value.float() for name, value in _read_weights(folder).items()}
    if config.embedding.kind == "tied":
        found.pop("lm_head.weight", None)  # some writers store it twice
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(f"{folder}: no tensor {missing[0]} ({len(missing)} are missing)")
    for name in sorted(found):
        if name.endswith("rotary_emb.inv_freq"):
            del found[name]  # old folders store it; it follows from rope_theta
        elif name not in wanted:
            raise CheckpointError(f"{folder}: tensor {name}: native models have no such weight")
        elif tuple(found[name].shape) != wanted[name]:
            raise CheckpointError(
                f"{folder}: tensor {name}: expected {wanted[name]}, found "
                f"{tuple(found[name].shape)}; config.json does not belong to these weights"
            )
    model.load_state_dict(found, assign=True)
    if model.lm_head.tied:
        weight = model.model.embed_tokens.output_weight
        assert weight is not None
        model.lm_head.weight = weight
    return model.eval()


def read_llama_tokenizer(folder: Path) -> Tokenizer:
    """The tiktoken vocabulary inside a byte-level BPE `tokenizer.json`.

    Its end-of-text id is the tokenizer's end-of-sequence token, whatever that is called there.

    Raises:
        CheckpointError: missing, damaged, or not a byte-level BPE with ranks as ids.
    """
    file = folder / TOKENIZER
    said = _read_json(file)
    try:
        pattern = _pattern(said["pre_tokenizer"])
        to_byte = _byte_of_character()
        added = {token["content"]: token["id"] for token in said["added_tokens"]}
        ranks = {
            bytes(to_byte[character] for character in token): id
            for token, id in said["model"]["vocab"].items()
            if token not in added
        }
    except (KeyError, TypeError, LookupError) as error:
        raise CheckpointError(
            f"{file}: not a byte-level BPE with a split pattern ({error!r:.80}), so no tiktoken "
            "vocabulary can be made of it; SentencePiece tokenizers cannot be read"
        ) from None
    special = {name: id for name, id in added.items() if name != UNUSED.format(id)}
    if END_OF_TEXT not in special:
        special[END_OF_TEXT] = special.pop(_end_of_sequence(folder, special))
    marker = folder / MARKER
    name = _read_json(marker).get("tokenizer") if marker.is_file() else None
    try:
        encoding = tiktoken.Encoding(
            name=name or folder.name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens=special,
        )
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file}: no tiktoken vocabulary can be made of it ({error})"
        ) from None
    return Tokenizer(encoding)


def _end_of_sequence(folder: Path, special: dict[str, int]) -> str:
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if name not in special:
        raise CheckpointError(
            f"{folder}: tokenizer_config.json names no end-of-sequence token among the special "
            f"ones of {TOKENIZER} (eos_token is {name!r})"
        )
    return name


def _pattern(pre_tokenizer: dict[str, Any]) -> str:
    """The regular expression that cuts text into words before merging."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    patterns = [part["pattern"]["Regex"] for part in parts if part["type"] == "Split"]
    if len(patterns) != 1 or "ByteLevel" not in {part["type"] for part in parts}:
        raise LookupError(f"pre-tokenizers {[part['type'] for part in parts]}")
    return patterns[0]


def _byte_of_character() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    # The alphabet is printable Latin in byte order, the other bytes from U+0100 on in theirs.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + place): byte for place, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


def _read_weights(folder: Path) -> dict[str, Tensor]:
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
    state: dict[str, Tensor] = {}
    for name in names:
        try:
            state |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / name}: missing or damaged ({error}); only safetensors are read"
            ) from None
    return state


def _read_json(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: missing or damaged ({error})") from None
    if not isinstance(said, dict):
        raise CheckpointError(f"{file}: damaged: not an object")
    return said
