"""The configuration of a run: frozen, strict pydantic models.

Derived values (`n_kv_heads`, `d_ff`, `padded_vocab_size`, `base`) may be omitted and are filled in
here, so that the resolved YAML contains them. Values that also depend on the world size are in
`leviathan.config.plan`.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from leviathan.config.base import (
    Beta,
    Dimension,
    Epsilon,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Strict,
    UserPath,
    VocabularySize,
    computed_default,
)
from leviathan.config.embeddings import EmbeddingConfig
from leviathan.config.embeddings.base import InputEmbeddingConfig

# ---------------------------------------------------------------- optimizer

# The role of a parameter. Every module declares its roles in `param_roles()`.
Role = Literal["table", "head", "matrix", "gain", "bias", "codebook", "spline"]
NOT_DECAYED: tuple[Role, ...] = ("gain", "bias")

Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]


class ParamGroupConfig(Strict):
    """Settings of the parameters with a role, or whose names match a pattern."""

    role: Role | None = Field(default=None, description="role of the parameters in this group")
    name: str | None = Field(
        default=None,
        min_length=1,
        description="glob pattern of parameter names, such as model.embed_tokens.*; not with role",
    )
    lr_scale: NonNegativeFloat = Field(
        default=1.0, description="multiplier of the learning rate; 0 freezes the parameters"
    )
    weight_decay: NonNegativeFloat | None = Field(
        default=None,
        description="weight decay; null: optim.weight_decay, or 0 for gains and biases",
    )
    betas: Betas | None = Field(default=None, description="AdamW's β₁ and β₂; null: optim.betas")
    clip: PositiveFloat | None = Field(
        default=None,
        description="maximum gradient norm of this group, clipped separately; null clips the group "
        "with all other parameters under optim.grad_clip",
    )

    @model_validator(mode="after")
    def _one_selector(self) -> "ParamGroupConfig":
        if (self.role is None) == (self.name is None):
            raise ValueError("role and name exclude each other; set one of them")
        return self

    @property
    def selector(self) -> str:
        """Formats the selector: `role=spline` or `name=model.embed_tokens.*`."""
        return f"role={self.role}" if self.role is not None else f"name={self.name}"


class OptimConfig(Strict):
    """AdamW and its schedule. The defaults are those of the controlled comparison in the paper."""

    lr: PositiveFloat = Field(default=1e-3, description="peak learning rate")
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="number of warmup steps, in which the learning rate rises linearly from 0",
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="learning-rate schedule after the warmup; wsd is constant, then decays over "
        "decay_fraction of the steps",
    )
    final_lr_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        strict=False,
        description="final learning rate, as a fraction of the peak",
    )
    decay_fraction: float = Field(
        default=0.1,
        gt=0,
        le=1,
        strict=False,
        description="fraction of the steps in which the learning rate decays (wsd only)",
    )
    betas: Betas = Field(default=(0.9, 0.999), description="AdamW's β₁ and β₂")
    eps: Epsilon = Field(default=1e-8, description="AdamW's ε")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="weight decay of all parameters except gains and biases"
    )
    grad_clip: PositiveFloat = Field(default=1.0, description="maximum global gradient norm")
    groups: list[ParamGroupConfig] = Field(
        default_factory=list,
        description="parameter groups with other settings; the first matching group applies (see "
        "`leviathan params --groups`). A name that matches nothing is an error, a role "
        "that the model does not have a warning of `leviathan check`",
    )
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="weight of the z-loss, the mean of (log Σ exp logits)²"
    )
    max_consecutive_skips: PositiveInt = Field(
        default=20,
        description="number of consecutive steps with non-finite loss or gradients after which the "
        "run fails",
    )


# ---------------------------------------------------------------- evaluation


class EvaluateConfig(Strict):
    """lm-eval tasks that run during training."""

    tasks: list[str] = Field(
        default_factory=list,
        description="lm-eval tasks to run during training, as for `leviathan eval`",
    )
    every: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="interval between task evaluations, in steps (0: only at the end)",
    )
    task_data: UserPath | None = Field(
        default=None, description="directory with the task data; null: downloaded"
    )
    limit: PositiveInt | None = Field(
        default=None, description="maximum samples per task; null: all"
    )
    batch_size: PositiveInt = Field(default=8, description="samples per forward pass")


# ---------------------------------------------------------------- tracking


class WandbConfig(Strict):
    """Weights & Biases. The API key comes from WANDB_API_KEY or `wandb login`."""

    project: str = Field(default="leviathan", min_length=1, description="name of the W&B project")
    entity: str | None = Field(
        default=None, description="W&B user or team; null: the account's default"
    )
    name: str | None = Field(
        default=None, description="name of the W&B run; null: the name of run_dir"
    )
    group: str | None = Field(default=None, description="W&B group of related runs")
    tags: list[str] = Field(default_factory=list, description="tags of the W&B run")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline writes run_dir/wandb, for `wandb sync` later"
    )


class TrackingConfig(Strict):
    """Services that receive the metrics, in addition to metrics.jsonl."""

    wandb: WandbConfig | None = Field(
        default=None, description="Weights & Biases; requires pip install 'leviathan[wandb]'"
    )
    tensorboard: bool = Field(
        default=False,
        description="write TensorBoard events to run_dir/tensorboard; requires pip install "
        "'leviathan[tensorboard]'",
    )


# ---------------------------------------------------------------- model


class ModelConfig(Strict):
    """A decoder-only, pre-norm Llama backbone and its input embedding."""

    d_model: Dimension = Field(description="width of the residual stream (D)")
    n_layers: int = Field(gt=0, le=10_000, description="number of transformer blocks")
    n_heads: Dimension = Field(
        description="number of attention heads; d_model / n_heads must be even"
    )
    n_kv_heads: Dimension = computed_default(
        "n_heads",
        compute=lambda heads: heads,
        default="n_heads",
        description="number of key and value heads (grouped-query attention); divides n_heads",
    )
    d_ff: Dimension = computed_default(
        "d_model",
        compute=lambda width: 4 * width,
        default="4 · d_model",
        description="hidden width of the SwiGLU MLP",
    )
    seq_len: Dimension = Field(default=512, description="context length in tokens")
    vocab_size: VocabularySize = Field(description="number of token ids of the tokenizer")
    padded_vocab_size: VocabularySize = computed_default(
        "vocab_size",
        compute=lambda size: size,
        default="vocab_size",
        description="vocabulary size of embedding and output head with padding (V); padded ids are "
        "masked out of the softmax",
    )
    rope_theta: PositiveFloat = Field(
        default=10_000.0, description="base of the rotary position embedding"
    )
    norm_eps: Epsilon = Field(default=1e-5, description="epsilon of RMSNorm")
    init_std: PositiveFloat = Field(
        default=0.02,
        description="standard deviation of the initial weights; divided by √(2 · n_layers) for the "
        "residual outputs",
    )
    embedding: EmbeddingConfig

    @field_validator("embedding")
    @classmethod
    def _resolved(cls, embedding: InputEmbeddingConfig, info: ValidationInfo) -> Any:
        shape = info.data
        if "padded_vocab_size" not in shape or "d_model" not in shape:
            return embedding  # these fields have their own errors
        return embedding.resolved(shape["padded_vocab_size"], shape["d_model"])

    @model_validator(mode="after")
    def _divisible(self) -> "ModelConfig":
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must divide d_model ({self.d_model})")
        if (self.d_model // self.n_heads) % 2:
            raise ValueError(f"d_model / n_heads = {self.d_model // self.n_heads} must be even")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) must divide n_heads ({self.n_heads})")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size ({self.padded_vocab_size}) is less than "
                f"vocab_size ({self.vocab_size})"
            )
        return self

    def tp_dimensions(self) -> dict[str, int]:
        """Dimensions that parallel.tp divides: name under `model.` → size."""
        names = ("n_heads", "n_kv_heads", "d_ff", "padded_vocab_size")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        return sizes | {
            f"embedding.{k}": size for k, size in self.embedding.tp_dimensions().items()
        }


class ModelFile(Strict):
    """A model configuration: `configs/model/*.yaml`."""

    model: ModelConfig


# ---------------------------------------------------------------- a training run


class MdsTokensFormat(Strict):
    """MDS shards of another program: a column of token ids and no dataset.json."""

    kind: Literal["mds_tokens"]
    column: str = Field(default="tokens", description="name of the column with the token ids")
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = Field(
        default=None,
        description="integer type of the token ids; required if the column is plain bytes",
    )
    tokenizer: str = Field(
        description="tokenizer of the token ids: a tiktoken encoding or a .tiktoken file"
    )
    vocab_size: VocabularySize | None = Field(
        default=None, description="number of token ids; null: the tokenizer's"
    )
    end_of_text: int | None = Field(
        default=None, ge=0, lt=2**31, description="end-of-text id; null: the tokenizer's"
    )
    cache: UserPath | None = Field(
        default=None, description="directory for unpacked shards; required for compressed shards"
    )


class DataConfig(Strict):
    """The dataset and the shuffling of its samples."""

    path: UserPath = Field(description="dataset directory with dataset.json, train/ and val/")
    remote: str | None = Field(
        default=None, description="URL of the dataset; data.path is then its local cache"
    )
    cache_limit: ByteSize | None = Field(
        default=None, description="maximum size of the local cache, such as 200GB; null: unlimited"
    )
    format: MdsTokensFormat | None = Field(
        default=None, description="format of a dataset that `leviathan prep` did not write"
    )
    shuffle_window: PositiveInt = Field(
        default=10_000, description="size of the shuffle window, in samples"
    )

    @model_validator(mode="after")
    def _one_place(self) -> "DataConfig":
        if self.remote is not None and self.format is not None:
            raise ValueError(
                "remote and format exclude each other: other formats are read from data.path only"
            )
        if self.remote is None and self.cache_limit is not None:
            raise ValueError("cache_limit requires remote")
        return self


class TrainConfig(Strict):
    """Length of the training and batch sizes, in samples."""

    steps: PositiveInt = Field(description="number of optimizer steps")
    global_batch_size: PositiveInt = Field(description="samples per optimizer step, over all ranks")
    micro_batch_size: PositiveInt = Field(
        description="samples per forward pass and rank; bounds the activation memory"
    )
    log_every: PositiveInt = Field(default=10, description="interval between log lines, in steps")
    eval_every: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="interval between validations, in steps (0: only at the end)",
    )
    spike_threshold_mads: NonNegativeFloat = Field(
        default=6.0,
        description="loss-spike threshold, in median absolute deviations above the running median "
        "(0 disables)",
    )
    peak_flops: PositiveFloat | None = Field(
        default=None, description="peak FLOP/s per device, for MFU; null: by the name of the device"
    )

    @model_validator(mode="after")
    def _micro_fits(self) -> "TrainConfig":
        if self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) is greater than "
                f"global_batch_size ({self.global_batch_size})"
            )
        return self


class EngineConfig(Strict):
    """Settings of all engines."""

    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="compute precision; with bf16, master weights, optimizer state and reductions "
        "stay in fp32",
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute the blocks in the backward pass, to save memory"
    )
    compile: bool = Field(default=False, description="compile the blocks with torch.compile")


class DeepSpeedConfig(EngineConfig):
    """DeepSpeed ZeRO. Its configuration is derived from the run; `extra` is merged into it."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="ZeRO stage. Sharded over the ranks: 0 nothing, 1 optimizer state, 2 also "
        "gradients, 3 also weights",
    )
    offload_optimizer: bool = Field(
        default=False, description="keep the optimizer state in CPU memory (ZeRO stages 1 to 3)"
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="additional keys of the DeepSpeed configuration"
    )

    @model_validator(mode="after")
    def _can_offload(self) -> "DeepSpeedConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        return self


class Fsdp2Config(EngineConfig):
    """PyTorch FSDP2 (fully_shard): weights, gradients and optimizer state are sharded."""

    kind: Literal["fsdp2"] = "fsdp2"
    dp_replicate: PositiveInt = Field(
        default=1,
        description="number of model replicas (HSDP); each is sharded over 1/dp_replicate of the "
        "data-parallel ranks",
    )


def _deepspeed_by_default(value: Any) -> Any:
    return {"kind": "deepspeed", **value} if isinstance(value, dict) else value


EngineChoice = Annotated[
    DeepSpeedConfig | Fsdp2Config,
    Field(discriminator="kind"),
    BeforeValidator(_deepspeed_by_default),
]


class ParallelConfig(Strict):
    """Distribution over the ranks. tp is the innermost dimension; the rest is data-parallel."""

    tp: PositiveInt = Field(
        default=1, description="tensor-parallel degree: ranks that share each weight matrix"
    )
    heartbeat_timeout_s: PositiveInt = Field(
        default=60,
        description="seconds without a heartbeat after which a rank is lost and the run ends",
    )
    collective_timeout_s: PositiveInt = Field(
        default=1800, description="timeout of collective operations, in seconds"
    )


class CheckpointConfig(Strict):
    """Interval and retention of checkpoints. The last step is always saved."""

    every: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="interval between checkpoints, in steps (0: only at the end and on a signal)",
    )
    keep_last: PositiveInt = Field(
        default=2, description="number of most recent checkpoints to keep"
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="keep the checkpoints of every n-th step permanently (0: none)",
    )
    async_save: bool = Field(
        default=True, description="write checkpoints in the background, from a copy in CPU memory"
    )


class RunConfig(Strict):
    """A training run: `leviathan train RUN.yaml`."""

    run_dir: UserPath = Field(description="run directory, with checkpoints and metrics.jsonl")
    seed: int = Field(
        default=1234,
        ge=0,
        lt=2**63,
        description="seed of the initial weights and of the data order",
    )
    init_from: UserPath | None = Field(
        default=None,
        description="checkpoint or run directory whose weights initialize the model; null: random "
        "weights",
    )
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    engine: EngineChoice = Field(default_factory=DeepSpeedConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _warmup_fits(self) -> "RunConfig":
        if self.optim.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optim.warmup_steps ({self.optim.warmup_steps}) must be less than "
                f"train.steps ({self.train.steps})"
            )
        return self

    @model_validator(mode="after")
    def _tp_fits(self) -> "RunConfig":
        tp, sizes = self.parallel.tp, self.model.tp_dimensions()
        wrong = [f"model.{name} ({size:,})" for name, size in sizes.items() if size % tp]
        if wrong:
            most = math.gcd(*sizes.values())
            fitting = [str(n) for n in range(1, most + 1) if most % n == 0]
            raise ValueError(
                f"parallel.tp={tp} does not divide {', '.join(wrong)}: set parallel.tp to one of "
                f"{', '.join(fitting)}, or make these multiples of {tp}"
            )
        return self
