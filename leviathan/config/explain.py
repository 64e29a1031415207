"""Messages for validation errors: location, found and expected value, and suggestions."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from leviathan.config.data import PrepConfig
from leviathan.config.experiment import ExperimentConfig
from leviathan.config.run import ModelFile, RunConfig
from leviathan.credentials import without_credentials

# ---------------------------------------------------------------- suggestions

# Key of torchtitan, Megatron-LM, Hugging Face Trainer, DeepSpeed, nanoGPT, LitGPT or OLMo →
# dotted key here, or a sentence if there is no single key.
_FOLLOWS = "it follows from train.global_batch_size, train.micro_batch_size and the number of ranks"
_RESUME = "run the same command again: it resumes from the latest checkpoint"
_LAUNCHER = "the number of ranks is the launcher's, e.g. `leviathan launch --ranks N`"
_WORLD = f"it follows from the number of ranks; {_LAUNCHER}"
_LENGTH = "set train.steps; one step is train.global_batch_size samples of model.seq_len tokens"
SYNONYMS = {
    # model
    "hidden_size": "model.d_model",
    "n_embd": "model.d_model",
    "dim": "model.d_model",
    "embed_dim": "model.d_model",
    "embedding_dim": "model.d_model",
    "hidden_dim": "model.d_model",
    "num_hidden_layers": "model.n_layers",
    "num_layers": "model.n_layers",
    "n_layer": "model.n_layers",
    "depth": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "num_heads": "model.n_heads",
    "n_head": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "num_query_groups": "model.n_kv_heads",
    "n_query_groups": "model.n_kv_heads",
    "n_kv_head": "model.n_kv_heads",
    "intermediate_size": "model.d_ff",
    "ffn_hidden_size": "model.d_ff",
    "ffn_dim": "model.d_ff",
    "mlp_hidden_size": "model.d_ff",
    "max_position_embeddings": "model.seq_len",
    "max_seq_len": "model.seq_len",
    "max_sequence_length": "model.seq_len",
    "sequence_length": "model.seq_len",
    "seq_length": "model.seq_len",
    "block_size": "model.seq_len",
    "context_length": "model.seq_len",
    "n_ctx": "model.seq_len",
    "rotary_base": "model.rope_theta",
    "rope_base": "model.rope_theta",
    "rms_norm_eps": "model.norm_eps",
    "layernorm_epsilon": "model.norm_eps",
    "initializer_range": "model.init_std",
    "init_method_std": "model.init_std",
    "tie_word_embeddings": "set model.embedding.kind: tied, or untied",
    "tie_embeddings": "set model.embedding.kind: tied, or untied",
    "untie_embeddings_and_output_weights": "set model.embedding.kind: untied, or tied",
    # batches and length
    "batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "global_train_batch_size": "train.global_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "local_batch_size": "train.micro_batch_size",
    "micro_batch": "train.micro_batch_size",
    "device_train_microbatch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": _FOLLOWS,
    "grad_accum_steps": _FOLLOWS,
    "accumulate_grad_batches": _FOLLOWS,
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "max_iters": "train.steps",
    "num_iterations": "train.steps",
    "total_steps": "train.steps",
    "epochs": _LENGTH,
    "num_epochs": _LENGTH,
    "num_train_epochs": _LENGTH,
    "max_tokens": _LENGTH,
    "train_tokens": _LENGTH,
    "max_duration": _LENGTH,
    "logging_steps": "train.log_every",
    "log_interval": "train.log_every",
    "log_freq": "train.log_every",
    "eval_steps": "train.eval_every",
    "eval_interval": "train.eval_every",
    # optimizer
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "beta1": "optim.betas",
    "beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "adam_eps": "optim.eps",
    "lr_scheduler_type": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "lr_decay_style": "optim.schedule",
    "lr_schedule": "optim.schedule",
    "warmup_iters": "optim.warmup_steps",
    "lr_warmup_iters": "optim.warmup_steps",
    "num_warmup_steps": "optim.warmup_steps",
    "warmup_ratio": "set optim.warmup_steps to a number of steps",
    "min_lr": "optim.final_lr_ratio",
    "min_lr_ratio": "optim.final_lr_ratio",
    "max_grad_norm": "optim.grad_clip",
    "clip_grad": "optim.grad_clip",
    "clip_grad_norm": "optim.grad_clip",
    "gradient_clipping": "optim.grad_clip",
    "gradient_clip_val": "optim.grad_clip",
    "max_norm": "optim.grad_clip",
    "wd": "optim.weight_decay",
    "z_loss_coeff": "optim.z_loss",
    "param_groups": "optim.groups",
    "optimizer": "optim",
    # engine and parallelism
    "bf16": "set engine.precision: bf16",
    "fp16": "set engine.precision: bf16; fp16 is not supported",
    "dtype": "engine.precision",
    "mixed_precision": "engine.precision",
    "gradient_checkpointing": "engine.activation_checkpointing",
    "recompute_granularity": "engine.activation_checkpointing",
    "torch_compile": "engine.compile",
    "stage": "engine.zero_stage",
    "cpu_offload": "engine.offload_optimizer",
    "deepspeed": "set engine.kind: deepspeed; further DeepSpeed keys belong to engine.extra",
    "fsdp": "set engine.kind: fsdp2",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "tp_size": "parallel.tp",
    "world_size": _WORLD,
    "num_gpus": _WORLD,
    "num_nodes": _WORLD,
    "nproc_per_node": _WORLD,
    "devices": _WORLD,
    "data_parallel_size": _WORLD,
    # directories, checkpoints, trackers
    "output_dir": "run_dir",
    "out_dir": "run_dir",
    "save_dir": "run_dir",
    "save_folder": "run_dir",
    "resume": _RESUME,
    "resume_from": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "load": _RESUME,
    "load_path": "init_from starts a new run from a checkpoint; to resume a run, " + _RESUME,
    "pretrained": "init_from",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_every": "checkpoint.every",
    "checkpoint_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "keep_latest_k": "checkpoint.keep_last",
    "wandb_project": "tracking.wandb.project",
    "wandb": "tracking.wandb",
    "report_to": "set tracking.wandb.project or tracking.tensorboard",
    "random_seed": "seed",
    # data
    "data_path": "data.path",
    "data_dir": "data.path",
    "dataset": "data.path",
    "train_data": "data.path",
    "streaming": "data.remote",
    "shuffle_buffer": "data.shuffle_window",
    "shuffle_block_size": "data.shuffle_window",
    # preparation
    "output": "out",
    "out_root": "out",
    "num_workers": "workers",
    "num_proc": "workers",
    "text_field": "source.text_key",
    "text_column": "source.text_key",
    "json_keys": "source.text_key",
    "input": "source.paths",
    "data_files": "source.paths",
    "concat_tokens": "seq_len",
    "tokenizer_name": "tokenizer",
    "tokenizer_model": "tokenizer",
    "val_fraction": "validation.fraction",
}


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice with the most similar spelling, ignoring case; None if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    match = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[match[0]] if match else None


def did_you_mean(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """`did you mean 'X'?` for the nearest choice, or else `otherwise`."""
    match = nearest(word, choices)
    return f"did you mean {match!r}?" if match else otherwise


def synonym(key: str) -> str | None:
    """Dotted key for a key of another project, or a sentence; None if the key is unknown."""
    return SYNONYMS.get(key.lower().replace("-", "_"))


# ---------------------------------------------------------------- messages

Path = tuple[str, ...]
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)*")

_FORMATS: dict[type[BaseModel], str] = {
    PrepConfig: "a dataset configuration for `leviathan prep` (configs/data)",
    RunConfig: "a run configuration for `leviathan train` (configs/run)",
    ModelFile: "a model configuration for `leviathan params` (configs/model)",
    ExperimentConfig: "an experiment for `leviathan experiment` (configs/experiments)",
}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The configuration models in an annotation (several for a union of kinds)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None and not get_args(annotation):
        return []
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _model_at(schema: type[BaseModel], path: Path, data: Any) -> type[BaseModel] | None:
    """The model of the section at `path`, selected by its `kind`."""
    model: type[BaseModel] | None = schema
    for key in path:
        field = model.model_fields.get(key) if model else None
        data = data.get(key) if isinstance(data, Mapping) else None
        if field is None:
            return None
        models = _models_in(field.annotation)
        kind = data.get("kind") if isinstance(data, Mapping) else None
        default = [m for m in models if kind is None and m is field.default_factory]
        model = next(
            (m for m in models if "kind" not in m.model_fields or kind == _kind_of(m)),
            models[0] if len(models) == 1 else default[0] if default else None,
        )
    return model


def _kind_of(model: type[BaseModel]) -> str | None:
    choices = get_args(model.model_fields["kind"].annotation)
    return choices[0] if choices else None


def _all_keys(schema: type[BaseModel], path: Path = ()) -> Iterator[Path]:
    for name, field in schema.model_fields.items():
        yield (*path, name)
        for model in _models_in(field.annotation):
            yield from _all_keys(model, (*path, name))


def _without_tags(loc: tuple[Any, ...], data: Any, missing: bool) -> Path:
    """The location without the union tags that pydantic inserts (`embedding.leviathan.knots`)."""
    path: list[str] = []
    for index, key in enumerate(loc):
        is_last = index == len(loc) - 1
        tagged = isinstance(data, Mapping) and key not in data and data.get("kind", key) == key
        if tagged and not (is_last and missing):
            continue
        path.append(str(key))
        if isinstance(data, Mapping):
            data = data.get(key)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            data = None
    return tuple(path)


def _unknown_key(path: Path, schema: type[BaseModel], data: Any) -> str:
    """Hint for an unknown key: the key to use instead."""
    section, key = path[:-1], path[-1]
    model = _model_at(schema, section, data) or schema
    siblings = list(model.model_fields)
    known = {".".join(each): each for each in _all_keys(schema)}
    ours = synonym(key)
    if ours in known:
        return f"unknown key; use {ours}"
    if ours and " " in ours:
        return f"unknown key; {ours}"
    if near := nearest(key, siblings):
        return f"unknown key; did you mean {'.'.join((*section, near))}?"
    for dotted, each in known.items():
        if each[-1] == key:
            return f"unknown key; did you mean {dotted}?"
    return f"unknown key; expected one of {', '.join(siblings)}"


def other_kind(keys: set[str], schema: type[BaseModel]) -> str | None:
    """Returns a sentence if the top-level keys are those of another kind of configuration."""
    unknown = sorted(keys - set(schema.model_fields))
    for other, described in _FORMATS.items():
        if len(unknown) > 1 and other is not schema and keys <= set(other.model_fields):
            return (
                f"found {described}, with the keys {', '.join(unknown)}; expected "
                f"{_FORMATS.get(schema, 'another kind of configuration')}"
            )
    return None


def _found(value: Any) -> str:
    text = without_credentials(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}…"


def _sentence(error: Any, path: Path, schema: type[BaseModel], data: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, schema, data)
    if kind == "missing":
        return "missing; this key is required"
    if kind == "union_tag_not_found":
        return f"`kind` is missing; expected one of {_tags(path, schema)}"
    if kind == "union_tag_invalid":
        near = nearest(str(context["tag"]), context["expected_tags"].replace("'", "").split(", "))
        hint = f"; did you mean {near}?" if near else ""
        return f"found kind {context['tag']!r}, expected one of {context['expected_tags']}{hint}"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(str(error["input"]), choices)
        hint = f"; did you mean {near}?" if near else ""
        return f"found {_found(error['input'])}, expected {context['expected']}{hint}"
    if kind in ("model_type", "model_attributes_type"):
        return f"found {_found(error['input'])}, expected a section of `key: value` lines"
    if kind == "value_error":
        return str(context["error"])
    if kind == "path_type":
        return f"found {_found(error['input'])}, expected a path"
    message = error["msg"]
    if message.startswith("Input should "):
        expected = message.removeprefix("Input should ").removeprefix("be ")
        return f"found {_found(error['input'])}, expected {expected}"
    return f"found {_found(error['input'])}: {message[:1].lower()}{message[1:]}"


def _tags(path: Path, schema: type[BaseModel]) -> str:
    model = _model_at(schema, path[:-1], {})
    field = model.model_fields.get(path[-1]) if model else None
    kinds = [_kind_of(m) for m in _models_in(field.annotation)] if field else []
    return ", ".join(repr(kind) for kind in kinds)


def explain(
    error: ValidationError,
    data: dict[str, Any],
    schema: type[BaseModel],
    source: str,
    origins: Mapping[Path, str],
) -> str:
    """One line per problem: `file:line: dotted.path: what was found, what was expected`."""
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        if problem["type"] == "default_factory_not_called":
            continue  # the field it is computed from is reported
        path = _without_tags(problem["loc"], data, problem["type"] == "missing")
        if problem["type"] == "union_tag_invalid":
            path = (*path, "kind")
        sentence = _sentence(problem, path, schema, data)
        # A contradiction between keys is at the keys that the sentence names.
        named = [(*path, *key.split(".")) for key in _KEY.findall(sentence)]
        spots = [origins[key] for key in named if key in origins]
        if problem["type"] != "value_error" or not spots:
            # For a missing key, the line of its section.
            above = [path[:n] for n in range(len(path), 0, -1)]
            spots = [origins[key] for key in above if key in origins][:1] or [source]
        start = ", ".join(sorted(set(spots)))
        lines.append(": ".join([start, *([".".join(path)] if path else []), sentence]))
    return "\n".join(lines)
