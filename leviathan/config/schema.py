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
from leviathan.config.optim import OptimConfig as OptimConfig
from leviathan.config.preparation import HubConfig as HubConfig
from leviathan.config.preparation import PrepConfig as PrepConfig
from leviathan.config.preparation import SourceConfig as SourceConfig
from leviathan.config.preparation import ValidationConfig as ValidationConfig
from leviathan.config.strict import (
    Epsilon,
    NonNegativeFloat,
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

    d_model: PositiveInt = Field(description="width of the residual stream")
    n_layers: PositiveInt = Field(description="blocks")
    n_heads: PositiveInt = Field(description="attention heads; d_model / n_heads must be even")
    n_kv_heads: PositiveInt = from_earlier(
        "n_heads",
        compute=lambda heads: heads,
        default="n_heads",
        description="key and value heads, shared in groups (GQA); divides n_heads",
    )
    d_ff: PositiveInt = from_earlier(
        "d_model",
        compute=lambda width: 4 * width,
        default="4 · d_model",
        description="hidden width of the SwiGLU MLP",
    )
    seq_len: PositiveInt = Field(default=512, description="context length in tokens")
    vocab_size: PositiveInt = Field(description="the tokenizer's number of ids")
    padded_vocab_size: PositiveInt = from_earlier(
        "vocab_size",
        compute=lambda size: size,
        default="vocab_size",
        description="rows of tables and output head; those beyond vocab_size are never predicted",
    )
    rope_theta: PositiveFloat = Field(default=10_000.0, description="base of RoPE's frequencies")
    norm_eps: Epsilon = Field(default=1e-5, description="under RMSNorm's root")
    init_std: PositiveFloat = Field(
        default=0.02,
        description="std of weights at step 0; residual outputs less by √(2 · n_layers)",
    )
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
    column: str = Field(default="tokens", description="that holds the ids")
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = Field(
        default=None, description="of the ids; needed where the column is plain bytes"
    )
    tokenizer: str = Field(description="whose ids they are: a tiktoken name or a .tiktoken file")
    vocab_size: PositiveInt | None = Field(default=None, description="else the tokenizer's")
    end_of_text: int | None = Field(default=None, ge=0, description="else the tokenizer's")
    cache: UserPath | None = Field(default=None, description="where packed shards are unpacked to")


class DataConfig(Strict):
    """Which dataset, and how far apart its rows are shuffled."""

    path: UserPath = Field(description="folder with dataset.json, train/ and val/")
    remote: str | None = Field(
        default=None, description="URL of such a folder, of which `path` is then the local cache"
    )
    cache_limit: ByteSize | None = Field(
        default=None, description="of shards kept under `path`, such as 200GB; else all"
    )
    format: MdsTokensFormat | None = Field(
        default=None, description="for a dataset that `leviathan prep` did not make"
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

    steps: PositiveInt = Field(description="optimizer steps of the whole run")
    global_batch_size: PositiveInt = Field(description="sequences a step, over all ranks")
    micro_batch_size: PositiveInt = Field(
        description="sequences at once on one rank; bounds memory"
    )
    log_every: PositiveInt = Field(default=10, description="steps; to metrics.jsonl")
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
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="cut over the ranks: nothing, masters and moments, gradients too, weights too",
    )
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
    keep_last: PositiveInt = Field(default=2, description="newest that stay")
    keep_every: int = Field(
        default=0, ge=0, description="checkpoints of every so-many-th step are never removed"
    )
    background: bool = Field(
        default=True, description="write while training goes on, from a copy in the CPU's memory"
    )


class RunConfig(Strict):
    """One training run: `leviathan train RUN.yaml`."""

    run_dir: UserPath = Field(description="folder of its checkpoints and metrics.jsonl")
    seed: int = Field(default=1234, ge=0, description="of weights and order of the data")
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
