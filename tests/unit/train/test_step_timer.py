"""What the log says of a step's time, and that it costs the other steps nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leviathan.config.plan import RunPlan
from leviathan.data.loader import TrainLoader
from leviathan.engine import build_engine
from leviathan.parallel.launch_env import read_launch_env
from leviathan.parallel.mesh import init_mesh
from leviathan.train.loop import new_model
from leviathan.train.step_timer import StepTimer

FIGURES = {"embedding_share", "head_share", "forward_s", "slowest_rank", "memory_peak_bytes"}


@pytest.mark.parametrize("engine", [{"kind": "fsdp2"}, {"kind": "deepspeed", "zero_stage": 1}])
def test_logged_steps_say_where_the_time_went(run_config, trained, engine):
    log = trained(run_config(engine=engine))
    assert [line["step"] for line in log if "loss" in line] == [1, 2, 4, 6, 8]
    for line in log:
        if "loss" not in line:
            continue
        assert line.keys() >= FIGURES
        assert 0 < line["embedding_share"] < 1
        assert 0 < line["head_share"] < 1
        assert line["embedding_share"] + line["head_share"] < 1
        assert line["forward_s"]["fastest"] == line["forward_s"]["slowest"] > 0
        assert line["slowest_rank"] == 0
        assert line["memory_peak_bytes"] > 50e6


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: a value read as a number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_not_logged_reads_no_value(run_config):
    """But for the two that the update hangs on, which are read at once, as one list.

    On the CPU each micro-batch counts its targets, in the loader's memory, and checks its ids,
    which on CUDA is left to the device.
    """
    config = run_config()
    mesh = init_mesh(read_launch_env(), tp=1)
    plan, clock = RunPlan(config, 1), StepTimer(mesh)
    engine = build_engine(lambda: clock.attached(new_model(config)), plan, mesh)
    stream = TrainLoader(config.data.path, 7, 100, 4, 2)
    counts = []
    for step, logged in enumerate([True, False, True, False]):
        batches = stream.microbatches(step, 0, 1)
        with Reads() as reads, clock.sampling(logged):
            engine.train_step(batches, 1e-3)
        assert bool(clock.figures()) == logged
        counts.append(reads.count)
    assert counts == [2 * plan.micro_batches] * 4
    with Reads() as reads:
        float(torch.ones(1))
    assert reads.count == 1  # the count counts
