"""Time that training waits for a save: asynchronous compared with synchronous.

    python benchmarks/checkpoint.py [--json] [--rounds N] [--dir DIR]

One process, FSDP2, the 60M-like model with 50k ids, steps of 64 tokens. "Waits" is the time until
training continues; "costs" also includes the slowdown of the steps during the write (they share the
cores with it).
"""

import time
from pathlib import Path

from harness import Report, arguments, ready
from run import one_batch, run_config, scratch, world

from leviathan.config.plan import RunPlan
from leviathan.engine import build_engine
from leviathan.engine.base import Engine
from leviathan.train.checkpoint_manager import CheckpointManager
from leviathan.train.loop import new_model

STEPS = 8  # after a save, enough for the write to finish during them


class Side:
    """An engine that saves synchronously or asynchronously."""

    def __init__(self, folder: Path, background: bool) -> None:
        folder.mkdir()
        config = run_config(
            folder, {"kind": "fsdp2"}, 1, 64, checkpoint={"async_save": background, "keep_last": 1}
        )
        self.mesh, self.batch = world(), one_batch(config)
        self.engine: Engine = build_engine(lambda: new_model(config), RunPlan(config, 1), self.mesh)
        self.saving = CheckpointManager(self.engine, config, self.mesh)
        self.step = 0
        self.steps(2)
        # As in a run, so that the memory for the copy is allocated.
        self.saving.check_space(resumed=False)

    def steps(self, count: int) -> float:
        """Returns the seconds of a number of steps."""
        begin = time.perf_counter()
        for _ in range(count):
            self.engine.train_step([self.batch], 1e-4)
        return time.perf_counter() - begin

    def save(self) -> tuple[float, float]:
        """Returns the seconds that training waits for a save, and its total cost in seconds."""
        plain = self.steps(STEPS)
        self.step += 1
        begin = time.perf_counter()
        self.saving.save({"step": self.step, "tokens": 0})
        waits = time.perf_counter() - begin
        beside = self.steps(STEPS)
        with self.saving:
            pass
        return waits, waits + beside - plain


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument(
        "--dir", type=Path, help="directory for checkpoints (default: a temporary directory)"
    )
    options = parser.parse_args()
    ready(options.device)
    report, folder = Report("checkpoint", options.json), options.dir or scratch()
    ours, other = Side(folder / "background", True), Side(folder / "synchronous", False)
    rounds = [(ours.save(), other.save()) for _ in range(options.rounds)]
    names = (("waits for a save", "≤ 0.1"), ("a save costs", "≤ 1"))
    for number, (name, goal) in enumerate(names):
        pairs = [(a[number], b[number]) for a, b in rounds]
        report.compare(f"training {name}" if not number else name, pairs, "synchronous", "s", goal)
    size = sum(f.stat().st_size for f in folder.rglob("*.distcp")) / 2
    report.figure("a checkpoint", size / 1e6, "MB")


if __name__ == "__main__":
    main()
