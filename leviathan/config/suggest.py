"""Suggestions for unknown keys: synonyms from other projects, then the nearest spelling."""

import difflib
from collections.abc import Iterable

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
