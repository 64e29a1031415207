"""The preflight checks of a configuration, its dataset and its nodes."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from leviathan.checkpoint.layout import complete_checkpoints, resolve_checkpoint, step_of
from leviathan.checkpoint.store import check_init_from, retention, verify_checkpoint
from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.console import progress_bar
from leviathan.data.dataset import Dataset, open_dataset, open_tokenizer
from leviathan.data.foreign_mds import ForeignShardReader
from leviathan.data.format import DatasetInfo
from leviathan.data.loader import check_fits
from leviathan.data.prepare.verify import verify
from leviathan.errors import ConfigError, DataError, LeviathanError
from leviathan.estimate.cost_model import USABLE_MEMORY, Hardware, estimate
from leviathan.estimate.layout import Device, parallel_layout
from leviathan.estimate.memory import memory
from leviathan.estimate.params import count_params
from leviathan.formatting import format_bytes, format_duration
from leviathan.launch.commands import SSH_OPTIONS, train_script
from leviathan.launch.hosts import Host
from leviathan.locks import is_locked
from leviathan.train.run_dir import LOCK, model_groups, new_resume_point, resume_point_of

# ---------------------------------------------------------------- results

Level = Literal["ok", "warning", "error"]
ORDER: tuple[Level, ...] = ("ok", "warning", "error")
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check; `message` says what was found and what to do."""

    subject: str
    level: Level
    message: str


@dataclass
class Report:
    """Findings in the order of the checks, and figures for `--json`."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, subject: str, level: Level, message: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(subject, level, message))

    @contextmanager
    def catching(self, subject: str) -> Iterator[None]:
        """Turns a user's error into a finding, so that the remaining checks run."""
        try:
            yield
        except LeviathanError as error:
            self.add(subject, "error", str(error))
        except OSError as error:
            self.add(subject, "error", f"{error.filename or subject}: {error.strerror}")

    @property
    def level(self) -> Level:
        """The highest level of all findings."""
        levels: list[Level] = [finding.level for finding in self.findings]
        return max(levels, key=ORDER.index) if levels else "ok"

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        findings = [asdict(finding) for finding in self.findings]
        return {"level": self.level, "findings": findings, **self.figures}


def table(report: dict[str, Any]) -> str:
    """Formats `Report.as_dict` for the terminal."""
    from rich.table import Table
    from rich.text import Text

    from leviathan.console import as_text

    shown = Table(title="Preflight checks", title_justify="left")
    for head in ("check", "result", "details"):
        shown.add_column(head, overflow="fold")
    for finding in report["findings"]:
        level = Text(finding["level"], style=_STYLES[finding["level"]])
        shown.add_row(finding["subject"], level, Text(finding["message"]))
    counts = [
        f"{count} {level}{'s' if count > 1 else ''}"
        for level in ("error", "warning")
        if (count := sum(finding["level"] == level for finding in report["findings"]))
    ]
    outcome = "Failed" if report["level"] == "error" else "Passed"
    return f"{as_text(shown)}\n{' with '.join([outcome, *filter(None, [' and '.join(counts)])])}."


# ---------------------------------------------------------------- configuration

TIGHT = 0.8  # share of the memory above which fragmentation may exceed the rest
TILE = 8  # bf16 values: tensor cores need dimensions that are multiples of it
IDLE = 0.1  # share of computed samples that are padding
LONG_S = 3600  # a run that takes longer needs checkpoints
WAITING = 0.5  # share of a step in communication


@dataclass(frozen=True)
class Target:
    """The device that the run will use."""

    name: str
    device: Device
    hardware: Hardware
    assumed: bool  # neither present on this machine nor given


def check_ranks(report: Report, config: RunConfig, world_size: int) -> RunPlan:
    """Checks how the ranks divide a step.

    Raises:
        ConfigError: the number of ranks is not divisible as configured.
    """
    plan, train = RunPlan(config, world_size), config.train
    parallel_layout(config, world_size)
    rows = plan.micro_batches * -(-plan.rows_per_rank_max // plan.micro_batches)
    idle = 1 - train.global_batch_size / (rows * plan.dp)
    why = (
        f"{world_size} = {plan.dp} data-parallel × {config.parallel.tp} tensor-parallel; "
        f"{train.global_batch_size:,} samples per step in {plan.micro_batches} "
        f"micro-batch(es) of {rows // plan.micro_batches} per rank"
    )
    if idle > IDLE:
        hint = f"use a global batch size that is divisible by {plan.dp}"
        report.add(
            "ranks", "warning", f"{why}; {idle:.0%} of the computed samples are padding: {hint}"
        )
    else:
        report.add("ranks", "ok", why)
    return plan


def check_model(report: Report, config: RunConfig) -> None:
    """Reports parameters and FLOPs; warns of shapes that run slowly."""
    found, model = count_params(config.model), config.model
    report.figures["parameters"] = {
        name: getattr(found, name) for name in ("total", "input_embedding", "output_head", "body")
    }
    report.figures["flops_per_token"] = found.flops_per_token
    why = (
        f"{found.kind}: {found.total:,} parameters ({found.input_embedding:,} in the input "
        f"embedding), {found.flops_per_token:.3g} FLOPs per token"
    )
    odd = [
        f"{name} is not a multiple of {tile}"
        for name, value, tile in (
            ("padded_vocab_size", model.padded_vocab_size // config.parallel.tp, TILE),
            ("d_model / n_heads", model.d_model // model.n_heads, 8),
        )
        if value % tile
    ]
    odd += [
        f"optim.groups: no parameter of this model matches {row['selector']}"
        for row in model_groups(model, config.optim)
        if not row["tensors"]
    ]
    report.add("model", "warning" if odd else "ok", "; ".join([why, *odd]))


def check_cost(report: Report, plan: RunPlan, target: Target) -> None:
    """Estimates time and device-hours from peak FLOP/s and MFU."""
    config, machine = plan.config, target.hardware
    tokens = config.train.steps * config.train.global_batch_size * config.model.seq_len
    report.figures |= {"steps": config.train.steps, "tokens": tokens}
    length = f"{config.train.steps:,} steps, {tokens:,} tokens"
    if not machine.flops:
        hint = "for an estimate of the time, use --peak-tflops or `leviathan launch … --probe`"
        report.add("time", "ok", f"{length}; {hint}")
        return
    layout = parallel_layout(config, plan.world_size, target.device)
    cost = estimate(config.model, layout, config.train.global_batch_size, machine)
    seconds = config.train.steps * cost.compute_s
    hours = seconds * plan.world_size / 3600
    report.figures |= {"seconds": seconds, "device_hours": hours, "mfu": machine.mfu}
    report.figures["communication_share"] = cost.communication_share
    why = (
        f"{length}: {format_duration(seconds)}, {hours:,.3g} device-hours at {machine.mfu:.0%} of "
        f"{machine.flops / 1e12:g} TFLOP/s; communication adds at most "
        f"{cost.communication_share:.0%} to a step"
    )
    level, hints = "ok", []
    if cost.communication_share > WAITING:
        hints.append("communication dominates: use fewer ranks or a larger global batch")
    if target.device == "cuda" and config.engine.precision == "fp32":
        hints.append("engine.precision=fp32 cannot reach this peak, which is for bf16")
    if hints:
        level, why = "warning", "; ".join([why, *hints])
    report.add("time", level, why)


def check_memory(report: Report, plan: RunPlan, target: Target) -> None:
    """Compares the memory per rank, by part, with the memory of the device."""
    layout = parallel_layout(plan.config, plan.world_size, target.device)
    held, room = memory(plan.config.model, layout), target.hardware.memory_bytes
    report.figures["memory"] = {
        **held.by_part, "total": held.total, "moment": held.moment, "device_bytes": room
    }  # fmt: skip
    parts = ", ".join(f"{name} {format_bytes(part)}" for name, part in held.by_part.items() if part)
    where = f"{target.name}{' (assumed; set --device)' if target.assumed else ''}"
    why = (
        f"{format_bytes(held.total)} of {format_bytes(room)} per rank on {where}, {held.moment}: "
        f"{parts}"
    )
    if held.total > USABLE_MEMORY * room:
        remedies = ["a smaller train.micro_batch_size"] if layout.micro_batch_size > 1 else []
        if not layout.recompute:
            remedies.append("engine.activation_checkpointing=true")
        if layout.dp > layout.shards or layout.zero_stage < 3:
            remedies.append("a higher engine.zero_stage or engine.kind=fsdp2")
        report.add("memory", "error", f"{why}. Try {', '.join([*remedies, 'more ranks'])}")
    elif held.total > TIGHT * room:
        report.add("memory", "warning", f"{why}. Fragmentation may exceed the remaining memory")
    else:
        report.add("memory", "ok", why)


def check_checkpoints(report: Report, config: RunConfig, world_size: int = 1) -> None:
    """Compares the size of the kept checkpoints with the free disk space."""
    plan, place = retention(config, world_size), existing_folder(config.run_dir)
    free = shutil.disk_usage(place).free
    needed = max(plan.bytes_needed, plan.bytes_each)
    report.figures["checkpoints"] = {
        "bytes": plan.bytes_each,
        "saves": plan.saves,
        "kept": len(plan.kept),
        "at_once": plan.at_once,
        "free_bytes": free,
    }
    why = (
        f"{format_bytes(plan.bytes_each)} each; {plan.saves:,} saved, {len(plan.kept):,} kept, at "
        f"most {plan.at_once:,} at once ({format_bytes(plan.at_once * plan.bytes_each)}); "
        f"{format_bytes(free)} free at {place}"
    )
    seconds = report.figures.get("seconds", 0)
    if free < needed:
        fewer = "free disk space, lower checkpoint.keep_last, or choose another run_dir"
        report.add("checkpoints", "error", f"{why}: {fewer}")
    elif not config.checkpoint.every and seconds > LONG_S:
        lost = f"a failure loses up to {format_duration(seconds)}: set checkpoint.every"
        report.add("checkpoints", "warning", f"{why}; only the final step is saved, so {lost}")
    else:
        report.add("checkpoints", "ok", why)


def check_run_dir(report: Report, config: RunConfig, info: DatasetInfo | None) -> None:
    """Checks that the run directory is writable, unlocked and compatible with the run."""
    there = complete_checkpoints(config.run_dir)
    existing = existing_folder(config.run_dir)
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(
            "run_dir.not_writable",
            f"{existing}: not a writable directory. Choose another run_dir.",
        )
    if is_locked(config.run_dir / LOCK):
        raise ConfigError(
            "run_dir.locked",
            f"{config.run_dir}: another process is training in this directory. Wait for it, or "
            "stop it.",
        )
    if there and info is not None:
        start = resume_point_of(config, info, there[-1])
        report.figures["starts_at_step"] = start.step
        if start.step >= config.train.steps:
            report.add("run_dir", "warning", f"{config.run_dir}: complete at step {start.step:,}: "
                       "no step would be trained; choose another run_dir")  # fmt: skip
            return
        why = f"{config.run_dir}: resumes from step {start.step:,} ({there[-1].name})"
    elif there:
        why = f"{config.run_dir}: contains checkpoints up to step {step_of(there[-1]):,}"
    else:
        new_resume_point(config)
        report.figures["starts_at_step"] = 0
        why = f"{config.run_dir}: starts at step 0"
    report.add("run_dir", "ok", why)


def check_first_weights(report: Report, config: RunConfig) -> None:
    """Checks the weights of `init_from` against the model and the dataset."""
    assert config.init_from is not None
    source = resolve_checkpoint(config.init_from)
    verify_checkpoint(source)
    warnings = check_init_from(config, source)
    level = "warning" if warnings else "ok"
    report.add("init_from", level, "; ".join([f"weights of {source}", *warnings]))


def existing_folder(path: Path) -> Path:
    """`path`, or its nearest parent directory that exists."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


# ---------------------------------------------------------------- dataset

MANY_EPOCHS = 4  # above, repeated text has diminishing value (arXiv 2305.16264)


def check_data(report: Report, config: RunConfig, thorough: bool) -> DatasetInfo | None:
    """Checks the dataset of a run; returns None if it cannot be used.

    Args:
        report: receives the findings.
        config: the run.
        thorough: whether to read and hash every byte, not only indices and sizes.
    """
    info = None
    with report.catching("dataset"):
        dataset = open_dataset(config.data, config.model.seq_len)
        info = dataset.info
        _check_files(report, config, dataset, thorough)
    if info is None:
        return None
    with report.catching("tokenizer"):
        check_fits(info, config.model, config.train.global_batch_size)
        _check_tokenizer(report, config, info)
    with report.catching("length"):
        _check_length(report, config, info)
    return info


def _check_files(report: Report, config: RunConfig, dataset: Dataset, thorough: bool) -> None:
    info = dataset.info
    splits = [dataset.rows(name) for name in info.splits]  # checks the shards
    rows = ", ".join(f"{split.rows:,} {name}" for name, split in info.splits.items())
    why = f"{config.data.path}: {rows} samples of {info.seq_len} tokens, {info.fingerprint[:12]}…"
    plain = dataset.cache is None and dataset.format is None
    foreign = (
        [split for split in splits if isinstance(split, ForeignShardReader)] if thorough else []
    )
    without_hash = sum(split.verify() for split in foreign)
    verified = thorough and dataset.cache is None and not without_hash
    if thorough and plain:
        verify(config.data.path)
    if verified:
        report.add("dataset", "ok", f"{why}; all hashes match")
    elif thorough and without_hash:
        report.add(
            "dataset", "warning", f"{why}; {without_hash:,} shards have no hash in index.json"
        )
    elif thorough:
        report.add(
            "dataset", "warning", f"{why}; shards of data.remote are verified when they are fetched"
        )
    else:
        report.add("dataset", "ok", f"{why}; sizes match (--verify-data also compares hashes)")
    report.figures["data"] = {
        "fingerprint": info.fingerprint,
        "rows": {name: split.rows for name, split in info.splits.items()},
        "vocab_size": info.vocab_size,
        "verified": verified,
    }


def _check_tokenizer(report: Report, config: RunConfig, info: DatasetInfo) -> None:
    tokenizer = open_tokenizer(config.data)
    if config.data.format is None and tokenizer.fingerprint != info.tokenizer.fingerprint:
        raise DataError(
            "tokenizer.mismatch",
            f"{config.data.path}: the tokenizer differs from the one in dataset.json. Copy the "
            "files again.",
        )
    report.add(
        "tokenizer",
        "ok",
        f"{info.tokenizer.name}: {tokenizer.vocab_size:,} ids, same as dataset and model; "
        f"padded to {config.model.padded_vocab_size:,}",
    )


def _check_length(report: Report, config: RunConfig, info: DatasetInfo) -> None:
    rows = info.split("train").rows
    epochs = config.train.steps * config.train.global_batch_size / rows
    report.figures["epochs"] = epochs
    why = f"{config.train.steps:,} steps read {epochs:.3g} epochs of {rows:,} samples"
    notes = []
    if epochs > MANY_EPOCHS:
        notes.append(f"more than {MANY_EPOCHS} epochs: prepare more text, or train fewer steps")
    if "val" not in info.splits or not info.split("val").rows:
        notes.append("no validation split: the validation loss is not computed")
    report.add("length", "warning" if notes else "ok", "; ".join([why, *notes]))


# ---------------------------------------------------------------- nodes

CONNECT_S = 10
AT_ONCE = 32
SHARED = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30  # enough for NCCL with eight ranks
# Files that killed processes of mosaicml-streaming, NCCL and torch leave.
LEFTOVERS = re.compile(
    r"\d{6}_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume"
    r"|epoch_shape|epoch_data)|nccl-.+|torch_\d+_.+"
)


def check_hosts(report: Report, hosts: Sequence[Host]) -> None:
    """Checks that each host of a hostfile answers over ssh and has this program at these paths."""
    away = [host for host in hosts if not host.is_here]
    with progress_bar("hosts", total=len(away)) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        problems = []
        for problem in pool.map(_ask, away):
            bar.advance(1)
            problems += [problem] if problem else []
    if problems:
        report.add("hosts", "error", "; ".join(problems))
    else:
        found = "all answer and have this program" if away else "only this machine"
        report.add("hosts", "ok", f"{len(hosts)} in the hostfile: {found}")


def _ask(host: Host) -> str | None:
    """The problem with a host; None if there is none."""
    try:
        socket.getaddrinfo(host.name, None)
    except OSError as error:
        return f"{host.name}: {error.strerror or error}: correct its name, or add it to /etc/hosts"
    paths = (sys.executable, str(Path(train_script()).absolute()))
    tests = " && ".join(f"test -e {shlex.quote(path)}" for path in paths)
    options = (*SSH_OPTIONS, "-o", f"ConnectTimeout={CONNECT_S}")
    command = ["ssh", *options, host.name, tests]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3 * CONNECT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return "ssh: not installed on this machine"
    except subprocess.TimeoutExpired:
        return f"{host.name}: no answer over ssh in {3 * CONNECT_S} s"
    if done.returncode == 0:
        return None
    if done.returncode == 1:
        missing = " or ".join(paths)
        return f"{host.name}: {missing} does not exist there: use the same paths on all nodes"
    errors = done.stderr.strip().splitlines()
    return f"{host.name}: ssh: {errors[-1] if errors else f'status {done.returncode}'}"


def check_port(report: Report, port: int, hosts: Sequence[Host]) -> None:
    """Checks that the master port is free, if the master is this machine."""
    if hosts and not (hosts[0].is_here or hosts[0].name == socket.gethostname()):
        report.add("port", "ok", f"{port} on {hosts[0].name}: not checked from this machine")
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        report.add(
            "port", "error", f"{port}: {error.strerror}{_holder(port)}: choose another --port"
        )
    else:
        report.add("port", "ok", f"{port} is free")


def _holder(port: int) -> str:
    """The process that listens on the port, where the system reports it."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr[1] == port and connection.pid:
                return f", by {psutil.Process(connection.pid).name()} ({connection.pid})"
    return ""


def check_shared_memory(report: Report, folder: Path = SHARED) -> None:
    """Checks the free space of /dev/shm, and files that killed processes left there."""
    if not folder.is_dir():
        return
    used = _mapped(folder)
    names = [path for path in folder.iterdir() if LEFTOVERS.fullmatch(path.name)]
    stale = [path for path in names if str(path) not in used]
    taken = 0
    for path in stale:
        with suppress(OSError):
            taken += path.stat().st_size
    free = shutil.disk_usage(folder).free
    report.figures["stale_shared_memory"] = {"files": len(stale), "bytes": taken}
    if stale:
        shown = ", ".join(sorted(path.name for path in stale)[:3])
        report.add(
            "shared memory",
            "warning",
            f"{len(stale)} unused file(s) in {folder} ({format_bytes(taken)}: {shown}…). Remove "
            "them; they do not affect this run, but other users of mosaicml-streaming",
        )
    elif free < MIN_SHARED_BYTES:
        report.add(
            "shared memory",
            "warning",
            f"{format_bytes(free)} free in {folder}; NCCL may need more. Start the container with "
            "--shm-size=8g.",
        )
    else:
        report.add("shared memory", "ok", f"{format_bytes(free)} free in {folder}, no unused files")


def _mapped(folder: Path) -> set[str]:
    """Files of the directory that processes have mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            found |= {f"{folder}{line.partition(str(folder))[2]}" for line in lines
                      if str(folder) in line}  # fmt: skip
        with suppress(OSError):
            found |= {str(link.readlink()) for link in (process / "fd").iterdir()}
    return found
