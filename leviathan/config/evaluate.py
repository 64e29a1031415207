"""The `evaluate` section of a run: lm-eval tasks while it is trained."""

from pydantic import Field

from leviathan.config.strict import PositiveInt, Strict, UserPath


class EvaluateConfig(Strict):
    """Tasks as `leviathan eval` runs them; without any, nothing is run."""

    tasks: list[str] = Field(default_factory=list, description="names, as for `leviathan eval`")
    every: int = Field(default=0, ge=0, description="steps; 0 runs them at the end only")
    task_data: UserPath | None = Field(
        default=None, description="folder with the tasks' files; then nothing is downloaded"
    )
    limit: PositiveInt | None = Field(default=None, description="samples a task; else all")
    batch_size: PositiveInt = Field(default=8, description="sequences at once")
