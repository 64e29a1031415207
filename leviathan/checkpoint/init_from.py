"""`init_from`: whether the weights of a checkpoint compute the same function in a run's model.

Equal shapes are not sufficient: with another number of heads, RoPE base or tokenizer, all shapes
are the same, but the model computes another function.
"""

from pathlib import Path

from leviathan.checkpoint.dcp import check_tensors
from leviathan.checkpoint.load import WEIGHTS, read_run_config, read_tokenizer
from leviathan.config.identity import flatten
from leviathan.config.schema import ModelConfig, RunConfig
from leviathan.console import say
from leviathan.data.dataset import open_tokenizer
from leviathan.errors import ConfigError
from leviathan.model.transformer import meta_model

# Keys of `model` that do not change what weights compute: initial values, lengths and layouts.
_INDEPENDENT = frozenset(
    {"seq_len", "init_std", "embedding.embedding_init_std", "embedding.spline_init_std"}
    | {"embedding.tp_mode", "embedding.target_params"}
)
# Keys that users change on purpose, for example for a longer context. All other keys are refused.
_ADJUSTABLE = frozenset({"rope_theta", "norm_eps", "vocab_size"})


def check_init_from(config: RunConfig, source: Path) -> list[str]:
    """Compares the model and tokenizer of a run with those of its initial checkpoint.

    Args:
        config: a run with `init_from`.
        source: the checkpoint's directory.

    Returns:
        Warnings: allowed differences, with both values.

    Raises:
        ConfigError: the weights would compute another function, or the ids are other tokens.
        CheckpointError: the checkpoint is corrupt.
    """
    former = read_run_config(source)
    refused, adjusted = _differences(config.model, former.model)
    if refused:
        raise ConfigError(
            "init_from.other_model",
            f"init_from={config.init_from}: {source} has another model:\n  "
            + "\n  ".join(refused)
            + "\nSet these keys as in the checkpoint, or remove init_from.",
        )
    model = meta_model(config.model)
    weights = {WEIGHTS + name: tuple(p.shape) for name, p in model.named_parameters()}
    check_tensors(source, weights, WEIGHTS)
    theirs, ours = read_tokenizer(source, former), open_tokenizer(config.data)
    if theirs.ranks != ours.ranks:
        raise ConfigError(
            "init_from.other_tokenizer",
            f"init_from={config.init_from}: {source} was trained with the tokenizer {theirs.name}, "
            f"but the dataset uses {ours.name}: the ids differ in meaning. Prepare the dataset "
            "with the checkpoint's tokenizer, or remove init_from.",
        )
    if theirs.fingerprint != ours.fingerprint:
        adjusted.append(
            f"tokenizer {theirs.name} (fingerprint {theirs.fingerprint[:12]}) in the checkpoint, "
            f"{ours.name} ({ours.fingerprint[:12]}) in the dataset: same merges, different split "
            "pattern or special tokens"
        )
    if theirs.end_of_text != ours.end_of_text:
        adjusted.append(
            f"end-of-text id {theirs.end_of_text} in the checkpoint, {ours.end_of_text} in the "
            "dataset"
        )
    return adjusted


def warn_of(source: Path, differences: list[str]) -> None:
    """Prints the warnings of `check_init_from`."""
    for difference in differences:
        say(f"warning: init_from {source}: {difference}", style="yellow")


def _differences(model: ModelConfig, former: ModelConfig) -> tuple[list[str], list[str]]:
    """Keys that differ, with both values: those to refuse and those to warn about."""
    here, there = flatten(model.model_dump(mode="json")), flatten(former.model_dump(mode="json"))
    if here["embedding.kind"] != there["embedding.kind"]:
        kinds = (there["embedding.kind"], here["embedding.kind"])
        return [f"model.embedding.kind: {kinds[0]} in the checkpoint, {kinds[1]} here"], []
    independent = _INDEPENDENT
    if here["embedding.kind"] == "binary_codes":
        independent -= {"embedding.embedding_init_std"}  # here a constant of the forward pass
    refused: list[str] = []
    adjusted: list[str] = []
    for key, value in here.items():
        if value != there[key] and key not in independent:
            line = f"model.{key}: {there[key]} in the checkpoint, {value} here"
            (adjusted if key in _ADJUSTABLE else refused).append(line)
    return refused, adjusted
