"""Which keys make a run: what may change when it is resumed, and what makes another arm of it.

The only definition of both; the trainer, the checks before it and the report import it, and the
table in docs/checkpoints.md is written from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key or a whole section; `resumable`: may it change when a run is resumed."""

    name: str
    reason: str
    resumable: bool = True


# None of these makes another arm: they change where, how fast or how often, or are the seed.
KEYS = (
    Key("run_dir", "where the run lies"),
    Key("seed", "a replicate: draws the weights and the order of the data", resumable=False),
    Key("data.path", "where the data set lies; its fingerprint must be the same"),
    Key("data.remote", "where it is fetched from"),
    Key("data.cache_limit", "how much of it is kept"),
    Key("data.format.cache", "where packed shards are unpacked to"),
    Key("engine", "how a step is computed"),
    Key("parallel", "how it is cut over the ranks, whose number may change too"),
    Key("model.embedding.tp", "how the ranks share LEV"),
    Key("checkpoint", "when to save and what to keep"),
    Key("train.micro_batch_size", "how a global batch is cut up"),
    Key("train.log_every", "how often a line is logged"),
    Key("train.eval_every", "how often the validation split is scored"),
    Key("train.spike_deviations", "which losses are warned of"),
    Key("train.peak_flops", "what MFU is relative to"),
    Key("optim.max_skipped", "when a run that cannot go on ends"),
    Key("evaluate", "which tasks are run while training"),
    Key("tracking", "which services see the metrics"),
)
# With a constant learning rate no step depends on how many are to follow.
STEPS = Key("train.steps", "the length of the run; only with `optim.schedule: constant`")

RESUMABLE = tuple(key.name for key in KEYS if key.resumable)
NOT_THE_ARM = tuple(key.name for key in KEYS)


def within(key: str, names: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of these, or lies in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one: dotted key → value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def changed_keys(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys in which two resolved configurations differ and that make them different runs."""
    there, here = flatten(former), flatten(now)
    free = RESUMABLE
    if there.get("optim.schedule") == here.get("optim.schedule") == "constant":
        free += (STEPS.name,)
    keys = [*here, *(key for key in there if key not in here)]
    return [key for key in keys if here.get(key) != there.get(key) and not within(key, free)]


def arm_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What runs of one arm have in common, as dotted keys."""
    return {key: value for key, value in flatten(config).items() if not within(key, NOT_THE_ARM)}


def markdown_table() -> str:
    """The keys as a table for the documentation."""
    lines = ["| key | meaning | may change on resume |", "|---|---|---|"]
    for key in (*KEYS, STEPS):
        resumable = "yes" if key.resumable else "no"
        lines.append(f"| `{key.name}` | {key.reason} | {resumable} |")
    return "\n".join(lines)
