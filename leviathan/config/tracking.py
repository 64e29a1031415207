"""The `tracking` section of a run: which services see its metrics beside metrics.jsonl."""

from typing import Literal

from pydantic import Field

from leviathan.config.strict import Strict


class WandbConfig(Strict):
    """Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`, never from here."""

    project: str = Field(default="leviathan", min_length=1)
    entity: str | None = Field(default=None, description="user or team; else the account's own")
    name: str | None = Field(default=None, description="else that of run_dir")
    group: str | None = None
    tags: list[str] = Field(default_factory=list)
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline writes run_dir/wandb, for `wandb sync` later"
    )


class TrackingConfig(Strict):
    """Nobody but metrics.jsonl, unless said otherwise."""

    wandb: WandbConfig | None = Field(default=None, description="pip install 'leviathan[wandb]'")
    tensorboard: bool = Field(
        default=False, description="into run_dir/tensorboard; pip install 'leviathan[tensorboard]'"
    )
