"""Trains every kind of input embedding on the quickstart's data and compares validation losses.

    make quickstart
    .venv/bin/python benchmarks/ablation_small.py [--seeds 1234 1235] [--steps N] [--json]

Arms differ in their input embedding alone: same body at step 0, same batches. Started again, it
passes over what is done. A run of this size shows that all kinds learn, not which one is better.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from leviathan.config.load import load_config
from leviathan.config.schema import RunConfig
from leviathan.console import console, say
from leviathan.model.accounting import Accounting, account
from leviathan.quickstart import logged

CONFIG = Path(__file__).parents[1] / "configs" / "run" / "ablation_small.yaml"
BASELINE = "tied"
SMALL_V1 = ("d_seed=32", "modes=4", "knots=16", "rank=16")  # as the YAML's LEV is small


def arms() -> dict[str, list[str]]:
    """The overrides that make each kind, matched in size to the YAML's own LEV where it can be."""
    model = load_config(CONFIG, [], RunConfig).model
    lev = model.embedding.parameters(model.padded_vocab_size, model.d_model)
    fields: dict[str, tuple[str, ...]] = {}
    fields |= {
        kind: (f"match_parameters={lev}",) for kind in ("albert", "flat_mlp", "factored_mlp")
    }
    fields |= {"tied": (), "untied": (), "binary_codes": (), "leviathan": ()}
    fields["leviathan_v1"] = SMALL_V1
    return {
        kind: [f"model.embedding.{field}" for field in (f"kind={kind}", *own)]
        for kind, own in fields.items()
    }


@dataclass(frozen=True)
class Arm:
    """One kind's results, a validation loss in nats per token for each seed."""

    kind: str
    counted: Accounting
    losses: list[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.losses) / len(self.losses)

    def differences(self, baseline: "Arm") -> list[float]:
        """Seed by seed: same seed, same batches."""
        return [ours - theirs for ours, theirs in zip(self.losses, baseline.losses, strict=True)]


def train_arm(kind: str, overrides: list[str], options: argparse.Namespace) -> Arm:
    """Trains one kind with every seed, or reads what an earlier start has left."""
    if options.steps:
        overrides = [*overrides, f"train.steps={options.steps}"]
        overrides += [f"optim.warmup_steps={options.steps // 10}"]
    losses = []
    for seed in options.seeds:
        run_dir = options.out / f"{kind}-{seed}"
        settings = [f"run_dir={run_dir}", f"data.path={options.data}", f"seed={seed}", *overrides]
        command = [sys.executable, "-m", "leviathan", "train", str(CONFIG), *settings]
        say(f"{kind}, seed {seed}", style="bold")
        subprocess.run(command, check=True, stdout=sys.stderr)
        validation = logged(run_dir, "val_loss")
        losses.append(validation[max(validation)])
    config = load_config(CONFIG, overrides, RunConfig)
    return Arm(kind, account(config.model), losses)


def show(results: list[Arm], baseline: Arm) -> None:
    """The table, the lowest loss first."""
    table = Table("kind", "input embedding", "all", "validation loss", f"less {BASELINE}")
    for arm in results:
        low, high = min(arm.differences(baseline)), max(arm.differences(baseline))
        spread = f"{low:+.4f}" if low == high else f"{low:+.4f} … {high:+.4f}"
        sizes = (f"{arm.counted.input_embedding:,}", f"{arm.counted.total:,}")
        table.add_row(arm.kind, *sizes, f"{arm.mean:.4f}", spread)
    console.print(table)


def main() -> None:
    """Runs all arms, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("quickstart/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablation_small"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234])
    parser.add_argument("--steps", type=int, help="instead of the YAML's")
    parser.add_argument("--json", action="store_true", help="one JSON object a kind")
    options = parser.parse_args()
    results = [train_arm(kind, overrides, options) for kind, overrides in arms().items()]
    results.sort(key=lambda arm: arm.mean)
    baseline = next(arm for arm in results if arm.kind == BASELINE)
    show(results, baseline)
    for arm in results if options.json else []:
        record = {"benchmark": "ablation_small", "case": arm.kind, "ours": arm.mean}
        record |= {"other": baseline.mean, "other_name": BASELINE, "unit": "nats per token"}
        record |= {"ratio": arm.mean / baseline.mean, "goal": None, "holds": None}
        record |= {"input_embedding": arm.counted.input_embedding, "total": arm.counted.total}
        record |= {"seeds": options.seeds, "losses": arm.losses}
        record |= {"matching": arm.counted.matching and arm.counted.matching.__dict__}
        print(json.dumps(record))


if __name__ == "__main__":
    main()
