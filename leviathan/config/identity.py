"""Which configuration keys may change when a run is resumed, and which define another arm.

The single definition of both: the trainer, the preflight checks and the report import it, and the
table in docs/checkpoints.md is generated from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key or a section; `resumable`: whether it may change when a run is resumed."""

    name: str
    reason: str
    resumable: bool = True


# None of these keys defines another arm: places, speed, logging and saving intervals, the seed.
KEYS = (
    Key("run_dir", "directory of the run"),
    Key(
        "seed",
        "seed of the initial weights and the data order; another seed is a replicate",
        resumable=False,
    ),
    Key("data.path", "directory of the dataset; its fingerprint must be the same"),
    Key("data.remote", "location from which shards are fetched"),
    Key("data.cache_limit", "maximum size of the local copy"),
    Key("data.format.cache", "directory for unpacked shards"),
    Key("engine", "engine that computes a step"),
    Key("parallel", "distribution over the ranks; their number may change, too"),
    Key("model.embedding.tp_mode", "tensor parallelism of LEV"),
    Key("checkpoint", "when checkpoints are saved, and which are kept"),
    Key("train.micro_batch_size", "sequences per rank and micro-batch; the global batch is fixed"),
    Key("train.log_every", "steps between log lines"),
    Key("train.eval_every", "steps between validations"),
    Key("train.spike_threshold_mads", "loss-spike threshold"),
    Key("train.peak_flops", "peak FLOP/s for MFU"),
    Key("optim.max_consecutive_skips", "consecutive non-finite steps after which a run fails"),
    Key("evaluate", "tasks evaluated during training"),
    Key("tracking", "services that receive the metrics"),
)
# With a constant learning rate, a step does not depend on the number of steps.
STEPS = Key("train.steps", "the length of the run; only with `optim.schedule: constant`")

RESUMABLE = tuple(key.name for key in KEYS if key.resumable)
NOT_IN_ARM = tuple(key.name for key in KEYS)


def within(key: str, names: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of `names`, or in a section of `names`."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flattens nested mappings: dotted key → value. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def changed_keys(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that differ between two resolved configurations and may not change on resume."""
    there, here = flatten(former), flatten(now)
    free = RESUMABLE
    if there.get("optim.schedule") == here.get("optim.schedule") == "constant":
        free += (STEPS.name,)
    keys = [*here, *(key for key in there if key not in here)]
    return [key for key in keys if here.get(key) != there.get(key) and not within(key, free)]


def arm_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values that runs of one arm have in common, as dotted keys."""
    return {key: value for key, value in flatten(config).items() if not within(key, NOT_IN_ARM)}


def markdown_table() -> str:
    """The keys as a table for the documentation."""
    lines = ["| key | meaning | may change on resume |", "|---|---|---|"]
    for key in (*KEYS, STEPS):
        resumable = "yes" if key.resumable else "no"
        lines.append(f"| `{key.name}` | {key.reason} | {resumable} |")
    return "\n".join(lines)
