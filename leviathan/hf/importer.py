"""Imports a Hugging Face Llama directory as a native checkpoint of kind tied or untied."""

import shutil
from pathlib import Path
from typing import Any

from leviathan.checkpoint.dcp import FlatShard, save_shards
from leviathan.checkpoint.layout import (
    CONFIG,
    STATE,
    complete_checkpoints,
    file_names,
    fingerprint,
    staging_dir,
    step_dir,
    write_json,
    write_manifest,
)
from leviathan.checkpoint.store import IMPORTED_KEY, PREFIX_TOKEN_KEY, commit
from leviathan.config.load import dump_config
from leviathan.config.run import RunConfig
from leviathan.data.id_comparison import compare_ids
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import CheckpointError, ConfigError, DataError
from leviathan.files import check_writable_dir
from leviathan.hf.export import AS_TEXT, quiet_transformers
from leviathan.hf.llama import (
    check_llama_pair,
    is_llama_folder,
    keep_tokenizer,
    read_llama_config,
    read_llama_model,
)
from leviathan.hf.tokenizer import read_llama_tokenizer

STEP = 0  # an import involves no training


def import_llama(folder: Path, run_dir: Path) -> dict[str, Any]:
    """Imports a Llama model as run_dir/checkpoints/step-00000000, without optimizer state.

    Every command that reads a checkpoint accepts it: perplexity, eval, frequency, generate, export.
    Before anything is written, the tokenizer's ids are compared with those of `tokenizers` and
    transformers. The checkpoint stores the tokenizer files of the directory, so that `export`
    writes the tokenizer unchanged.

    Args:
        folder: directory with config.json, safetensors and tokenizer.json.
        run_dir: directory to create.

    Returns:
        Path, kind, sizes and tokenizer of the written checkpoint.

    Raises:
        CheckpointError: the directory is corrupt, or its model or tokenizer cannot be reproduced.
        ConfigError: `run_dir` already contains checkpoints.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    if not is_llama_folder(folder):
        raise CheckpointError(
            "import.not_found", f"{folder}: not a Llama model directory (it has no config.json)"
        )
    if complete_checkpoints(run_dir):
        raise ConfigError(
            "import.not_empty", f"{run_dir}: already contains checkpoints; choose another run_dir"
        )
    check_writable_dir(run_dir)
    model_config = read_llama_config(folder)
    tokenizer = read_llama_tokenizer(folder)
    check_llama_pair(folder, model_config, tokenizer)
    documents = _compare_with_transformers(folder, tokenizer)
    model = read_llama_model(folder, model_config)
    # A valid run configuration is required although nothing is trained: no data, one step.
    config = RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "data": {"path": run_dir / "data"},
            "model": model_config.model_dump(),
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
        }
    )
    final, draft = step_dir(run_dir, STEP), staging_dir(run_dir, STEP)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
        slices = [FlatShard(key, tuple(t.shape), 0, t.reshape(-1)) for key, t in tensors.items()]
        save_shards(slices, draft)
        state = {
            "step": STEP,
            "tokens": 0,
            "optimizer_steps": 0,
            "world_size": 1,
            IMPORTED_KEY: str(folder),
            PREFIX_TOKEN_KEY: tokenizer.prefix_token,
        }
        write_json(draft / STATE, state | keep_tokenizer(folder, draft))
        (draft / CONFIG).write_text(dump_config(config))
        tokenizer.save(draft)
        write_manifest(draft, fingerprint(draft, file_names(draft)))
        commit(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {
        "checkpoint": str(final),
        "kind": model_config.embedding.kind,
        "vocab_size": model_config.vocab_size,
        "parameters": sum(value.numel() for value in tensors.values()),
        "tokenizer": tokenizer.name,
        "texts_compared": documents,
    }


def _compare_with_transformers(folder: Path, tokenizer: Tokenizer) -> int:
    """Compares the ids with those of transformers; returns the number of compared texts.

    transformers may give other ids than the `tokenizers` library, because it also reads
    tokenizer_config.json.

    Raises:
        CheckpointError: the tokenizer cannot be loaded, or ids differ.
    """
    try:
        fast = quiet_transformers().PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the type of the exception depends on the files
        raise CheckpointError(
            "import.unsupported_tokenizer",
            f"{folder}: transformers cannot load the tokenizer ({type(error).__name__}: {error})",
        ) from None

    def encode(texts: list[str]) -> list[list[int]]:
        return fast(texts, **AS_TEXT).input_ids

    try:
        return compare_ids(tokenizer, encode, "transformers")
    except DataError as error:
        raise CheckpointError("import.failed", f"{folder}: {error}; nothing was written") from None
