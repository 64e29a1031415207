"""Throughput of one rank and of several, and the share of communication in a step.

    python benchmarks/scaling.py [--json] [--rounds N] [--device cuda] [--rows N] [--ranks N]

The number of samples per rank is constant (weak scaling), with one thread per rank on the CPU or
one device on CUDA. The ranks run once as independent single-rank worlds at the same time, and once
as one world: the additional time per step is communication, not contention for shared cores or
memory. One rank alone on the machine is measured first.
"""

import argparse
import multiprocessing
import os
import statistics
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import Report, arguments, ready, seconds
from run import one_batch, run_config, scratch

from leviathan.config.plan import RunPlan
from leviathan.engine import build_engine
from leviathan.parallel.launch_env import free_port, read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh
from leviathan.train.loop import new_model

LR = 1e-4
ENGINES: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"kind": "deepspeed", "zero_stage": 1},
    "ZeRO-3": {"kind": "deepspeed", "zero_stage": 3},
    "FSDP2": {"kind": "fsdp2"},
}


def on_a_rank(
    pipe: Connection, place: dict[str, str], engine: str, options: argparse.Namespace
) -> None:
    """Returns the seconds of each step of one rank except the first."""
    os.environ.update(place)
    torch.set_num_threads(1)
    mesh = init_mesh(read_launch_env(), tp=1)
    config = run_config(scratch(), ENGINES[engine], options.rows)
    train = config.train.model_copy(update={"global_batch_size": options.rows * mesh.world_size})
    config = config.model_copy(update={"train": train})
    batch = one_batch(config)
    built = build_engine(lambda: new_model(config), RunPlan(config, mesh.world_size), mesh)

    def step() -> None:
        built.train_step([batch], LR)

    step()
    pipe.send(batch.input_ids.numel())
    pipe.recv()  # so that single-rank worlds also start together
    pipe.send([seconds(step, mesh.device) for _ in range(options.rounds)])
    leave_mesh()


def run(ranks: int, together: bool, engine: str, options: argparse.Namespace) -> tuple[int, float]:
    """Returns (tokens per step and rank, median seconds) for concurrent ranks."""
    context = multiprocessing.get_context("spawn")
    started, port = [], free_port()
    for rank in range(ranks):
        place = {"RANK": rank if together else 0, "WORLD_SIZE": ranks if together else 1}
        place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks if together else 1}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port if together else free_port()}
        if not together:  # a single-rank world sees one device, as number 0
            place |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": rank}
        settings = {name: str(value) for name, value in place.items()}
        ours, theirs = context.Pipe()
        arguments_ = (theirs, settings, engine, options)
        process = context.Process(target=on_a_rank, args=arguments_, daemon=True)
        process.start()
        started.append((process, ours))
    tokens = [pipe.recv() for _, pipe in started]
    for _, pipe in started:
        pipe.send("go")
    times = [time for _, pipe in started for time in pipe.recv()]
    for process, _ in started:
        process.join()
    return tokens[0], statistics.median(times)


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "", rounds=7)
    parser.add_argument(
        "--rows", type=int, default=2, help="sequences of 512 tokens per rank (default: 2)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks (2)")
    options = parser.parse_args()
    ready(options.device)
    report = Report("scaling", options.json)
    for engine in ENGINES:
        tokens, alone = run(1, True, engine, options)
        _, apart = run(options.ranks, False, engine, options)
        _, together = run(options.ranks, True, engine, options)
        case = f"{engine}, 60m-50k, {tokens} tokens a rank"
        report.figure(f"{case}: 1 rank", tokens / alone, "tokens/s")
        report.figure(
            f"{case}: {options.ranks} ranks", options.ranks * tokens / together, "tokens/s"
        )
        report.figure(f"{case}: communication", 100 * max(0.0, 1 - apart / together), "% of step")


if __name__ == "__main__":
    main()
