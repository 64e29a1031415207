"""A Hugging Face Llama folder as a native checkpoint, of kind tied or untied."""

import shutil
from pathlib import Path
from typing import Any

from leviathan.checkpoint.boxes import Slice, save_slices
from leviathan.checkpoint.layout import complete_checkpoints, draft_dir, step_dir
from leviathan.checkpoint.manifest import (
    CONFIG,
    STATE,
    file_names,
    fingerprint,
    write_json,
    write_manifest,
)
from leviathan.config.load import dump_config
from leviathan.config.schema import RunConfig
from leviathan.data.files import check_folder
from leviathan.errors import CheckpointError, ConfigError
from leviathan.evaluate.llama_folder import (
    is_llama_folder,
    read_llama_config,
    read_llama_model,
    read_llama_tokenizer,
)

STEP = 0  # nothing was trained here


def import_llama(folder: Path, run_dir: Path) -> dict[str, Any]:
    """Writes run_dir/checkpoints/step-00000000 from a Llama folder: weights, no moments.

    Every command that reads a checkpoint takes it: perplexity, eval, frequency, generate, export.

    Args:
        folder: with config.json, safetensors and tokenizer.json.
        run_dir: folder to make.

    Returns:
        What was written.

    Raises:
        CheckpointError: the folder is damaged, or no model that can be had natively.
        ConfigError: `run_dir` has checkpoints already.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    if not is_llama_folder(folder):
        raise CheckpointError(f"{folder}: no Llama folder (it has no config.json)")
    if complete_checkpoints(run_dir):
        raise ConfigError(f"{run_dir} has checkpoints already: name a new folder")
    check_folder(run_dir)
    model_config = read_llama_config(folder)
    tokenizer = read_llama_tokenizer(folder)
    model = read_llama_model(folder, model_config)
    # What a run's configuration must say though nothing was run: no data, one step.
    config = RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "data": {"path": run_dir / "data"},
            "model": model_config.model_dump(),
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
        }
    )
    final, draft = step_dir(run_dir, STEP), draft_dir(run_dir, STEP)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
        slices = [Slice(key, tuple(t.shape), 0, t.reshape(-1)) for key, t in tensors.items()]
        save_slices(slices, draft)
        write_json(draft / STATE, {"step": STEP, "tokens": 0, "imported_from": str(folder)})
        (draft / CONFIG).write_text(dump_config(config))
        tokenizer.save(draft)
        write_manifest(draft, fingerprint(draft, file_names(draft)))
        shutil.rmtree(final, ignore_errors=True)  # without a manifest it is no checkpoint
        draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {
        "checkpoint": str(final),
        "kind": model_config.embedding.kind,
        "vocab_size": model_config.vocab_size,
        "parameters": sum(value.numel() for value in tensors.values()),
        "tokenizer": tokenizer.name,
    }
