"""What the tests of engines share: tiny runs, batches cut over any ranks, and a bare torch loop."""

import json
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.data.loader import IGNORE, Batch
from leviathan.engine import build_engine
from leviathan.optim import lr_at
from leviathan.parallel.launch_env import read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh
from leviathan.train.loop import new_model

STEPS, ROWS, MICRO, SEQ = 4, 6, 2, 16  # 6 rows on 2 ranks in micro-batches of 2: accumulation 2

TIED = {"kind": "tied"}
ALBERT = {"kind": "albert", "width": 4}
LEVIATHAN = {"kind": "leviathan", "d_seed": 8, "heads": 2, "knots": 4, "rank": 4}

# Every setting of a group once; the first that matches a parameter applies.
GROUPS = [
    {"role": "spline", "lr_scale": 0.5, "weight_decay": 0.2},
    {"role": "gain", "weight_decay": 0.3, "clip": 0.02},
    {"name": "model.layers.0.*", "betas": [0.8, 0.99], "clip": 0.1},
    {"name": "model.layers.*", "lr_scale": 0},
    {"role": "head", "lr_scale": 2},
]

ENGINES = {f"ZeRO-{stage}": {"kind": "deepspeed", "zero_stage": stage} for stage in (0, 1, 2, 3)}
ENGINES["FSDP2"] = {"kind": "fsdp2"}


def config(folder, embedding, engine, tp=1, **optim):
    """A run; `engine` is a name of ENGINES or a mapping."""
    chosen = ENGINES[engine] if isinstance(engine, str) else engine
    return RunConfig.model_validate(
        {
            "run_dir": str(folder),
            "seed": 7,
            "data": {"path": str(folder / "data")},
            "model": {
                "d_model": 16,
                "n_layers": 2,
                "n_heads": 4,
                "d_ff": 32,
                "seq_len": SEQ,
                "vocab_size": 61,
                "padded_vocab_size": 64,
                "embedding": embedding,
            },
            "train": {"steps": 6, "global_batch_size": ROWS, "micro_batch_size": MICRO},
            "optim": {"lr": 1e-2, "warmup_steps": 2, "grad_clip": 0.5, "weight_decay": 0.1} | optim,
            "engine": chosen,
            "parallel": {"tp": tp},
        }
    )


def rows_of(step):
    """A global batch [ROWS, SEQ]; some targets are masked, unequally over rows."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (ROWS, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, SEQ - 2 * row :] = IGNORE if row else targets[row, SEQ:]
    return tokens[:, :-1], targets


def batches(step, rank, ranks):
    """The micro-batches of this rank, possibly uneven, padded to full size."""
    inputs, targets = rows_of(step)
    mine = list(range(ROWS * rank // ranks, ROWS * (rank + 1) // ranks))
    per_rank = MICRO * math.ceil(math.ceil(ROWS / ranks) / MICRO)
    mine += [-1] * (per_rank - len(mine))
    made = []
    for chunk in (mine[i : i + MICRO] for i in range(0, per_rank, MICRO)):
        ids = torch.stack([inputs[row] for row in chunk])
        wanted = torch.stack(
            [targets[row] if row >= 0 else torch.full((SEQ,), IGNORE) for row in chunk]
        )
        unique, inverse = ids.unique(return_inverse=True)
        made.append(Batch(ids, wanted, unique, inverse, tuple(chunk)))
    return made


DONE = {}  # bare loops of this process: many engines are held to the same one


@dataclass
class Trained:
    """Result of a few training steps."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def bare_loop(run, steps=STEPS):
    """The same training in plain torch, in one process, with full batches."""
    key = (str(run.model), str(run.optim), steps)  # the engines are the only other difference
    if key not in DONE:
        DONE[key] = _bare_loop(run, steps)
    return DONE[key]


# Roles by the last part of a name, written by hand. Norms' gains and all biases do not decay.
ROLES = {
    "gain": ("norm.weight", "layernorm.weight", "norm_weight"),
    "bias": ("latent_bias", "norm_bias"),
    "spline": ("spline_delta",),
    "head": ("lm_head.weight",),
}


def role_of(name):
    return next((role for role, ends in ROLES.items() if name.endswith(ends)), None)


def _bare_loop(run, steps):
    model = new_model(run)
    optimizer = torch.optim.AdamW(
        [_settings(name, p, run.optim) for name, p in model.named_parameters()], eps=run.optim.eps
    )
    done = Trained([], [], {})
    for step in range(steps):
        inputs, targets = rows_of(step)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(run.optim, run.train.steps, step) * group["lr_scale"]
        loss = model(inputs, targets) / (targets != IGNORE).sum()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        done.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        done.losses.append(loss.item())
        together = {}
        for group in optimizer.param_groups:
            together.setdefault(group["clipped_with"], []).extend(group["params"])
        for (highest, _), parameters in together.items():
            torch.nn.utils.clip_grad_norm_(parameters, highest)
        optimizer.step()
        optimizer.zero_grad()
    done.weights = {name: p.detach() for name, p in model.named_parameters()}
    return done


def _settings(name, parameter, optim):
    """One parameter's own group of the bare loop."""
    settings = {
        "params": [parameter],
        "lr_scale": 1.0,
        "weight_decay": 0.0 if role_of(name) in ("gain", "bias") else optim.weight_decay,
        "betas": optim.betas,
        "clipped_with": (optim.grad_clip, None),
    }
    for number, group in enumerate(optim.groups):
        if fnmatchcase(name, group.name) if group.name else role_of(name) == group.role:
            settings["lr_scale"] = group.lr_scale
            settings["betas"] = group.betas or optim.betas
            if group.weight_decay is not None:
                settings["weight_decay"] = group.weight_decay
            if group.clip is not None:
                settings["clipped_with"] = (group.clip, number)
            break
    return settings


def build(run, mesh):
    return build_engine(lambda: new_model(run), RunPlan(run, mesh.world_size), mesh)


def advance(engine, run, mesh, first, last):
    """Trains steps `first … last - 1`: their losses and gradient norms."""
    stats = [
        engine.train_step(
            batches(step, mesh.dp_rank, mesh.dp), lr_at(run.optim, run.train.steps, step)
        )
        for step in range(first, last)
    ]
    return [s.loss for s in stats], [s.grad_norm for s in stats]


def whole_state(engine):
    """Name → weight and both moments [3, …]."""
    states = engine.iter_full_state()
    return {s.name: torch.stack([s.weight, s.exp_avg, s.exp_avg_sq]) for s in states}


def save(engine, folder, mesh):
    """A checkpoint without the state of the training loop."""
    if mesh.rank == 0:
        folder.mkdir()
        updates = engine.optimizer_steps
        state = {"step": updates, "optimizer_steps": updates}
        (folder / "state.json").write_text(json.dumps(state))
    mesh.any(False)
    engine.save(folder).wait()
    mesh.any(False)


def assert_equal_states(found, expected, label):
    assert found.keys() == expected.keys(), label
    for name, state in found.items():
        assert torch.equal(state, expected[name]), f"{label}: {name}"


@contextmanager
def world_of(ranks, port, tp=1):
    """Among the processes of one launch the first `ranks` as a world of their own: (mesh) or None.

    DeepSpeed remembers the process group it saw first, and numbers modules and parameters of all
    models that it sees; it cannot be reset.
    """
    rank = int(os.environ["RANK"])
    if rank >= ranks:
        yield None
        return
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_PORT=str(port))
    with fresh_world(tp) as mesh:
        yield mesh


@contextmanager
def fresh_world(tp=1):
    """A mesh of all ranks, after which this process can begin another with any engine."""
    torch.set_num_threads(1)
    try:
        yield init_mesh(read_launch_env(), tp)
    finally:
        leave_mesh()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        if deepspeed := sys.modules.get("deepspeed"):
            deepspeed.comm.comm.cdb = None
            deepspeed.utils.groups._WORLD_GROUP = deepspeed.utils.groups.mpu = None
            zero = deepspeed.runtime.zero
            offload = zero.parameter_offload.DeepSpeedZeRoOffload
            offload._register_deepspeed_module.__defaults__ = ([0],)
            zero.partition_parameters.Init.param_id = 0


def on_each_rank(folder, *checks, tp=1):
    """Runs each check (directory, mesh) in one launch, because starting ranks takes long."""
    mesh = init_mesh(read_launch_env(), tp)
    torch.set_num_threads(1)
    try:
        return [check(Path(folder), mesh) for check in checks]
    finally:
        leave_mesh()
