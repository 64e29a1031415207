"""The `evaluate` section of a run: lm-eval tasks during training."""

from pydantic import Field

from leviathan.config.strict import PositiveInt, Strict, UserPath


class EvaluateConfig(Strict):
    """lm-eval tasks that run during training."""

    tasks: list[str] = Field(
        default_factory=list,
        description="lm-eval tasks to run during training, as for `leviathan eval`",
    )
    every: int = Field(
        default=0,
        ge=0,
        description="interval between task evaluations, in steps (0: only at the end)",
    )
    task_data: UserPath | None = Field(
        default=None, description="directory with the task data; null: downloaded"
    )
    limit: PositiveInt | None = Field(
        default=None, description="maximum samples per task; null: all"
    )
    batch_size: PositiveInt = Field(default=8, description="samples per forward pass")
