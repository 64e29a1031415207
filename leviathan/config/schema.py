"""The configuration as the user writes it: frozen, strict pydantic models.

Values that follow from others (`n_kv_heads`, `d_ff`, `padded_vocab_size`, `base`) may be left out
and are filled in here, so the resolved YAML always states them. What follows from the configuration
*and* the world size is in `leviathan.config.plan`.
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

from leviathan.config.embedding import EmbeddingConfig, InputEmbeddingConfig
from leviathan.config.embedding import LeviathanConfig as LeviathanConfig
from leviathan.config.embedding import TiedConfig as TiedConfig
from leviathan.config.embedding import lev_base as lev_base
from leviathan.config.evaluate import EvaluateConfig
from leviathan.config.strict import (
    Beta,
    NonNegativeFloat,
    Paths,
    PositiveFloat,
    PositiveInt,
    Strict,
    UserPath,
    from_earlier,
)
from leviathan.config.tracking import TrackingConfig

# ---------------------------------------------------------------- model


class ModelConfig(Strict):
    """A decoder-only, pre-norm, Llama-named backbone and its input embedding."""

    d_model: PositiveInt
    n_layers: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt = from_earlier("n_heads", compute=lambda heads: heads)
    d_ff: PositiveInt = from_earlier("d_model", compute=lambda width: 4 * width)
    seq_len: PositiveInt = Field(default=512, description="context length in tokens")
    vocab_size: PositiveInt = Field(description="the tokenizer's number of ids")
    padded_vocab_size: PositiveInt = from_earlier("vocab_size", compute=lambda size: size)
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    init_std: PositiveFloat = 0.02
    embedding: EmbeddingConfig

    @field_validator("embedding")
    @classmethod
    def _resolved(cls, embedding: InputEmbeddingConfig, info: ValidationInfo) -> Any:
        shape = info.data
        if "padded_vocab_size" not in shape or "d_model" not in shape:
            return embedding  # what is wrong there is told by itself
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

    def cut_by_tp(self) -> dict[str, int]:
        """What parallel.tp cuts into equal parts: name under `model.` → size."""
        names = ("n_heads", "n_kv_heads", "d_ff", "padded_vocab_size")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        return sizes | {f"embedding.{k}": size for k, size in self.embedding.cut_by_tp().items()}


class ModelFile(Strict):
    """A file that describes a model alone: `configs/model/*.yaml`."""

    model: ModelConfig


# ---------------------------------------------------------------- a training run


class MdsTokensFormat(Strict):
    """MDS shards that another converter wrote: one column of ids, no dataset.json."""

    kind: Literal["mds_tokens"]
    column: str = "tokens"
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = Field(
        default=None, description="of the ids; needed where the column is plain bytes"
    )
    tokenizer: str = Field(description="whose ids they are: a tiktoken name or a .tiktoken file")
    vocab_size: PositiveInt | None = Field(default=None, description="else the tokenizer's")
    end_of_text: int | None = Field(default=None, ge=0, description="else the tokenizer's")
    cache: UserPath | None = Field(default=None, description="where packed shards are unpacked to")


class DataConfig(Strict):
    """Which data set, and how far apart its rows are shuffled."""

    path: UserPath = Field(description="folder with dataset.json, train/ and val/")
    remote: str | None = Field(
        default=None, description="URL of such a folder, of which `path` is then the local cache"
    )
    cache_limit: ByteSize | None = Field(
        default=None, description="of shards kept under `path`, such as 200GB; else all"
    )
    format: MdsTokensFormat | None = Field(
        default=None, description="for a data set that `leviathan prep` did not make"
    )
    shuffle_window: PositiveInt = Field(default=10_000, description="rows")

    @model_validator(mode="after")
    def _one_place(self) -> "DataConfig":
        if self.remote is not None and self.format is not None:
            raise ValueError("give remote or format, not both: a foreign set is read locally")
        if self.remote is None and self.cache_limit is not None:
            raise ValueError("cache_limit needs remote: without it nothing under path is removed")
        return self


class TrainConfig(Strict):
    """How long and how much at once. Batch sizes are in sequences."""

    steps: PositiveInt
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    log_every: PositiveInt = 10
    eval_every: int = Field(default=0, ge=0, description="steps; 0 evaluates at the end only")
    spike_deviations: NonNegativeFloat = Field(
        default=6.0,
        description="warn of a loss so many robust deviations over the running median; 0: never",
    )
    peak_flops: PositiveFloat | None = Field(
        default=None, description="of one device, FLOP/s, for MFU; else by the device's name"
    )

    @model_validator(mode="after")
    def _micro_fits(self) -> "TrainConfig":
        if self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) is more than "
                f"global_batch_size ({self.global_batch_size})"
            )
        return self


class OptimConfig(Strict):
    """AdamW and its schedule; the defaults are the recipe of the controlled comparison."""

    lr: PositiveFloat = Field(default=1e-3, description="peak learning rate")
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1, strict=False)
    decay_fraction: float = Field(
        default=0.1, gt=0, le=1, strict=False, description="of all steps, at the end (wsd)"
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = Field(default=1.0, description="global norm")
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="weight of (log Σ exp logits)² in the training loss"
    )
    max_skipped: PositiveInt = Field(default=20, description="non-finite steps in a row allowed")


class EngineConfig(Strict):
    """What every engine can do."""

    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16 computes in bf16; masters, moments and sums stay fp32"
    )
    activation_checkpointing: bool = Field(
        default=False, description="blocks compute anew in the backward pass: less memory"
    )
    compile: bool = Field(default=False, description="torch.compile of the blocks")


class DeepSpeedConfig(EngineConfig):
    """DeepSpeed ZeRO. Its JSON is derived from the plan; `extra` is merged into it."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = Field(
        default=False, description="masters and moments in the CPU's memory (stages 1–3)"
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="further DeepSpeed JSON keys")

    @model_validator(mode="after")
    def _can_offload(self) -> "DeepSpeedConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        return self


class Fsdp2Config(EngineConfig):
    """PyTorch's fully_shard: weights, gradients and moments all cut over the ranks."""

    kind: Literal["fsdp2"] = "fsdp2"
    replicas: PositiveInt = Field(
        default=1, description="copies of the model, each cut over 1/replicas of the ranks (HSDP)"
    )


def _deepspeed_by_default(value: Any) -> Any:
    return {"kind": "deepspeed", **value} if isinstance(value, dict) else value


EngineChoice = Annotated[
    DeepSpeedConfig | Fsdp2Config,
    Field(discriminator="kind"),
    BeforeValidator(_deepspeed_by_default),
]


class ParallelConfig(Strict):
    """How the world is cut. tp is the innermost axis; the rest is data-parallel."""

    tp: PositiveInt = Field(default=1, description="ranks that share each matrix of the model")
    lost_after_s: PositiveInt = Field(
        default=60, description="a rank silent for so long is lost, and the others end"
    )
    timeout_s: PositiveInt = Field(
        default=1800, description="a collective that takes longer fails: some rank hangs"
    )


class CheckpointConfig(Strict):
    """When to save and what to keep. The last step is always saved."""

    every: int = Field(
        default=0, ge=0, description="steps; 0 saves at the end and on a signal only"
    )
    keep_last: PositiveInt = 2
    keep_every: int = Field(
        default=0, ge=0, description="checkpoints of every so-many-th step are never removed"
    )
    background: bool = Field(
        default=True, description="write while training goes on, from a copy in the CPU's memory"
    )


class RunConfig(Strict):
    """One training run: `leviathan train RUN.yaml`."""

    run_dir: UserPath
    seed: int = Field(default=1234, ge=0)
    init_from: UserPath | None = Field(
        default=None, description="checkpoint or run whose weights step 0 begins with"
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
        tp, sizes = self.parallel.tp, self.model.cut_by_tp()
        wrong = [f"model.{name} ({size:,})" for name, size in sizes.items() if size % tp]
        if wrong:
            most = math.gcd(*sizes.values())
            fitting = [str(n) for n in range(1, most + 1) if most % n == 0]
            raise ValueError(
                f"parallel.tp={tp} does not divide {', '.join(wrong)}: set parallel.tp to one of "
                f"{', '.join(fitting)}, or make these multiples of {tp}"
            )
        return self


# ---------------------------------------------------------------- corpus preparation


class HubConfig(Strict):
    """A data set of the Hugging Face Hub, or a local folder that `datasets` loads."""

    id: str
    config: str | None = None
    split: str = "train"
    revision: str | None = Field(default=None, description="branch, tag or commit")
    text_column: str = "text"
    subset_column: str | None = None


class SubsetsConfig(Strict):
    """Which subsets to keep: those named, or all but those named."""

    include: Paths = Field(default_factory=list)
    exclude: Paths = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_of_them(self) -> "SubsetsConfig":
        if self.include and self.exclude:
            raise ValueError("give include or exclude, not both")
        return self


class SourceConfig(Strict):
    """What to read, in this order; inside a folder or a glob, in name order."""

    paths: Paths = Field(default_factory=list, description="files, globs, folders or URLs")
    hub: HubConfig | None = None
    text_key: str = Field(default="text", min_length=1, description="dotted path")
    subset_key: str = Field(default="meta.pile_set_name", min_length=1, description="dotted path")
    default_subset: str = Field(default="unnamed", min_length=1)
    subsets: SubsetsConfig = Field(default_factory=SubsetsConfig)

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceConfig":
        if not self.paths and self.hub is None:
            raise ValueError("nothing to read: give source.paths or source.hub")
        if self.paths and self.hub is not None:
            raise ValueError("give paths or hub, not both (paths=[] takes the paths away)")
        return self


class ValidationConfig(Strict):
    """Where the validation split comes from: own shards, or a share of the documents by hash."""

    paths: Paths = Field(default_factory=list, description="held-out files, globs or folders")
    hub: HubConfig | None = Field(default=None, description="in place of paths")
    fraction: float = Field(
        default=0.005, ge=0, lt=1, strict=False, description="by content hash; unused with paths"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "ValidationConfig":
        if self.paths and self.hub is not None:
            raise ValueError("give paths or hub, not both")
        return self


class PrepConfig(Strict):
    """One corpus preparation: `leviathan prep CONFIG.yaml`."""

    source: SourceConfig
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    tokenizer: str = Field(description="a tiktoken name such as o200k_base, or a .tiktoken file")
    seq_len: PositiveInt = 512
    out: UserPath
    workers: PositiveInt = 1
    executor: Literal["local", "ray", "rank"] = Field(
        default="local", description="where: processes here, a Ray cluster, one slice a rank"
    )
    on_error: Literal["fail", "quarantine"] = "fail"
    max_reject_fraction: float = Field(default=0.01, ge=0, le=1, strict=False)
    max_document_bytes: PositiveInt = Field(
        default=1 << 28, description="longer lines are bad lines; bounds memory"
    )
    drop_duplicates: bool = False
    backend: Literal["auto", "gigatoken", "tiktoken"] = Field(
        default="auto", description="what encodes; never changes an id"
    )
    mixing: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="epochs of the training split by subset; 1 if not named"
    )
