"""The `tracking` section of a run: services that receive its metrics."""

from typing import Literal

from pydantic import Field

from leviathan.config.strict import Strict


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
