"""Cost of logging: steps that are timed and logged, compared with steps that are not.

    python benchmarks/metrics_cost.py [--json] [--rounds N] [--device cuda] [--rows N]

Every step of one side is logged, as with `train.log_every: 1`: hooks on embedding, head and
model, collecting their values, a line of metrics.jsonl, the text of the progress bar.
The other side runs the same step of the same engine without logging. Steps alternate, so that both
sides run under the same conditions. A run logs every tenth step, which costs a tenth of this.
"""

import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from batch import text_batch
from harness import Report, arguments, paired, ready, seconds

from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.data.loader import Batch
from leviathan.engine import build_engine
from leviathan.engine.base import StepStats
from leviathan.estimate.params import count_params
from leviathan.parallel.launch_env import free_port, read_launch_env
from leviathan.parallel.mesh import init_mesh
from leviathan.train.loop import new_model
from leviathan.train.metrics import Metrics
from leviathan.train.step_timer import StepTimer

SEQ_LEN, VOCABULARY, PADDED = 512, 8_193, 8_256


class Steps:
    """One engine on one batch, with and without its log."""

    def __init__(self, folder: Path, rows: int) -> None:
        config = RunConfig.model_validate(
            {
                "run_dir": str(folder / "run"),
                "data": {"path": str(folder)},
                "model": {
                    **{"d_model": 256, "n_layers": 4, "n_heads": 4, "seq_len": SEQ_LEN},
                    **{"vocab_size": VOCABULARY, "padded_vocab_size": PADDED},
                    "embedding": {"kind": "leviathan"},
                },
                "train": {"steps": 10**6, "global_batch_size": rows, "micro_batch_size": rows},
                "engine": {"kind": "fsdp2"},
            }
        )
        mesh = init_mesh(read_launch_env(), tp=1)
        self.clock, size = StepTimer(mesh), count_params(config.model)
        self.engine = build_engine(
            lambda: self.clock.attached(new_model(config)), RunPlan(config, 1), mesh
        )
        self.log = folder / "metrics.jsonl"
        self.metrics = Metrics(self.log, 0, 0, 0, size.flops_per_token, 1, writes=True, steps=10**6)
        ids, self.source = text_batch(rows)
        ids = ids % VOCABULARY
        unique, inverse = ids.unique(return_inverse=True)
        self.batch = Batch(ids, ids.roll(-1, 1), unique, inverse, tuple(range(rows)))
        self.done = 0

    def plain(self) -> StepStats:
        """A step that is not logged."""
        self.done += 1
        with self.clock.sampling(False):
            stats = self.engine.train_step([self.batch], 1e-4)
        self.metrics.add(stats)
        return stats

    def sampled(self) -> StepStats:
        """The timed part of a logged step, before writing."""
        self.done += 1
        with self.clock.sampling(True):
            stats = self.engine.train_step([self.batch], 1e-4)
        self.metrics.add(stats)
        return stats

    def logged(self) -> None:
        """A step that is logged."""
        self.write(self.sampled())

    def write(self, stats: StepStats) -> None:
        """Writes the log line after a step."""
        self.metrics.note(stats)
        self.metrics.log(self.done, stats, 1e-4, sampled=self.clock.figures())


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=31)
    parser.add_argument(
        "--rows", type=int, default=4, help=f"of {SEQ_LEN} tokens per step (default: 4)"
    )
    options = parser.parse_args()
    device = ready(options.device)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder), options.rows)
        report = Report("metrics_cost", options.json)
        steps.plain()
        steps.logged()
        case = f"a step of {options.rows * SEQ_LEN} tokens, every step logged, {steps.source}"
        pairs = paired(steps.logged, steps.plain, options.rounds, device)
        report.compare(case, pairs, "not logged", "s", "≤ 1.01")
        # Step times vary by more than the cost of a log line, so it is also measured separately.
        step = statistics.median(plain for _, plain in pairs)
        alone = [
            seconds(partial(steps.write, steps.sampled()), device) for _ in range(options.rounds)
        ]
        share = statistics.median(alone) / step * 100
        report.figure("the line by itself, of a step", share, "%", at_most=1)
        torch.distributed.destroy_process_group()
        assert json.loads(steps.log.read_text().splitlines()[0])["head_share"] > 0


if __name__ == "__main__":
    main()
