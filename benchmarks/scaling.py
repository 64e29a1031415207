"""Tokens a second at one rank and at several, and the share of a step that communication takes.

    python benchmarks/scaling.py [--json] [--rounds N] [--device cuda] [--rows N] [--ranks N]

Every rank has the same rows at any number of ranks (weak scaling), one thread on the CPU, one
device on CUDA. The ranks run once as so many worlds of one, at the same time but without a word to
each other, and once as one world: what a step takes longer then is communication, and not cores or
memory that they share. One rank alone on the machine comes first.
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
    """Seconds of each step of one rank, the first one omitted."""
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
    pipe.recv()  # so that worlds of one begin together, too
    pipe.send([seconds(step, mesh.device) for _ in range(options.rounds)])
    leave_mesh()


def run(ranks: int, together: bool, engine: str, options: argparse.Namespace) -> tuple[int, float]:
    """(tokens of a rank's step, its median seconds) where so many ranks run at once."""
    context = multiprocessing.get_context("spawn")
    started, port = [], free_port()
    for rank in range(ranks):
        place = {"RANK": rank if together else 0, "WORLD_SIZE": ranks if together else 1}
        place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks if together else 1}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port if together else free_port()}
        if not together:  # a world of one sees one device, by the number 0
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
    parser.add_argument("--rows", type=int, default=2, help="sequences of 512 tokens a rank (2)")
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
