"""The `optim` section: AdamW, its schedule and its parameter groups."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from leviathan.config.strict import (
    Beta,
    Epsilon,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Strict,
)

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
