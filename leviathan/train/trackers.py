"""Weights & Biases and TensorBoard, which receive the lines of metrics.jsonl.

The only module that imports wandb. metrics.jsonl remains authoritative: a service that fails is
reported once and disabled, and receives the missing lines at the next start of the run.
"""

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from leviathan.checkpoint.layout import RUN
from leviathan.checkpoint.store import read_run_config
from leviathan.config.load import dump_config
from leviathan.config.run import RunConfig, TrackingConfig, WandbConfig
from leviathan.console import say
from leviathan.credentials import cleaned
from leviathan.errors import CheckpointError, ConfigError
from leviathan.files import read_json
from leviathan.train.metrics_log import METRICS, read_lines

KINDS = ("loss", "val_loss", "tasks")  # keys that distinguish the lines of one step
DELIVERED = "tracking.json"
INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 30, 120


class _Service(Protocol):
    def log(self, line: dict[str, Any]) -> None: ...
    def show(self, images: dict[str, Path]) -> None: ...
    def close(self) -> None: ...


def check_packages(tracking: TrackingConfig) -> None:
    """Checks before training that the packages of the services are installed.

    Raises:
        ConfigError: a package is not installed.
    """
    trackers = {"wandb": tracking.wandb is not None, "tensorboard": tracking.tensorboard}
    for package, enabled in trackers.items():
        if enabled and find_spec(package) is None:
            off = "null" if package == "wandb" else "false"
            raise ConfigError(
                "tracking.not_installed",
                f"tracking.{package}: the package {package} is not installed. Run pip install "
                f"'leviathan[{package}]', or set tracking.{package}={off}",
            )


class Tracker:
    """The tracking services of a run, on rank 0; their errors never stop the run.

    Args:
        config: the run.
        run_id: kept over restarts.
        step: finished steps; what a former start logged beyond them is repeated.
        about: properties in addition to the configuration: code, data, hardware.
    """

    def __init__(self, config: RunConfig, run_id: str, step: int, about: dict[str, Any]) -> None:
        self._services: list[_Service] = []
        tracking, described = config.tracking, {**public_config(config), "about": about}
        if (wandb := tracking.wandb) is not None:
            self._open("wandb", lambda: _Wandb(wandb, config.run_dir, run_id, described))
        if tracking.tensorboard:
            self._open("TensorBoard", lambda: _TensorBoard(config, step, described))

    def _open(self, name: str, build: Callable[[], _Service]) -> None:
        try:
            self._services.append(build())
        except Exception as error:
            _warn(name, error)

    def log(self, line: dict[str, Any]) -> None:
        """Sends one line of metrics.jsonl."""
        self._each(lambda service: service.log(line))

    def show(self, images: dict[str, Path]) -> None:
        """Sends PNG files, by name."""
        self._each(lambda service: service.show(images))

    def close(self) -> None:
        """Flushes and closes the services."""
        self._each(lambda service: service.close())
        self._services = []

    def _each(self, use: Callable[[_Service], None]) -> None:
        for service in list(self._services):
            try:
                use(service)
            except Exception as error:
                self._services.remove(service)
                _warn(type(service).__name__.removeprefix("_"), error)


def attach(run_dir: Path, images: dict[str, Path]) -> bool:
    """Sends PNG files, by name, to the services of a finished run; False if it has none.

    Raises:
        ConfigError: a service's package is not installed.
        CheckpointError: the run's configuration is missing or corrupt.
    """
    described, log = run_dir / RUN, list(read_lines(run_dir / METRICS))
    if not described.is_file() or not log:
        return False
    config = read_run_config(run_dir).model_copy(update={"run_dir": run_dir})
    about = read_json(described, "run.corrupt", error=CheckpointError)
    if config.tracking == TrackingConfig() or "run_id" not in about:
        return False
    check_packages(config.tracking)
    tracker = Tracker(config, about["run_id"], log[-1]["step"], about)
    tracker.show(images)
    tracker.close()
    return True


def _warn(name: str, error: Exception) -> None:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    say(
        f"warning: {name} failed and is disabled; metrics.jsonl is still written: {reason}",
        style="yellow",
    )


class _Wandb:
    """One wandb run per run, over all its restarts.

    Its history only grows, so a step that is repeated is not sent twice: the values are the same.
    tracking.json records the last step that was sent; missing earlier steps are sent now.
    """

    def __init__(
        self, config: WandbConfig, run_dir: Path, run_id: str, described: dict[str, Any]
    ) -> None:
        import wandb

        self._wandb, self._file = wandb, run_dir / DELIVERED
        self._sent: dict[str, int] = {}
        if self._file.exists():
            found = json.loads(self._file.read_text())
            self._sent = found["sent"] if found["id"] == run_id else {}
        self._id, self._former = run_id, dict(self._sent)
        self._run = self._begin(config, run_dir, described)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        for line in read_lines(run_dir / METRICS):
            self.log(line)

    def _begin(self, config: WandbConfig, run_dir: Path, described: dict[str, Any]) -> Any:
        """Starts a run on the server, or an offline run if the server is unreachable."""
        settings = self._wandb.Settings(
            silent=True,  # the location of an offline run is printed in `close`
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,  # the command line, among others
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        wishes = {
            **{"id": self._id, "resume": "allow", "dir": str(run_dir), "config": described},
            **{"project": config.project, "entity": config.entity, "group": config.group},
            **{"name": config.name or run_dir.name, "tags": config.tags, "settings": settings},
        }
        if config.mode == "online" and os.environ.get("WANDB_MODE", "online") == "online":
            try:
                self._wandb.setup(self._wandb.Settings(silent=True))
                if not self._wandb.login(prompt=False, verify=False):
                    raise ConnectionError("no API key: set WANDB_API_KEY or call `wandb login`")
                return self._wandb.init(mode="online", **wishes)
            except Exception as error:
                say(
                    f"warning: wandb is unreachable; logging offline: {str(error).splitlines()[0]}",
                    style="yellow",
                )
                self._wandb.teardown()  # it keeps the id of the run that failed to start
        return self._wandb.init(mode="offline", **wishes)

    def log(self, line: dict[str, Any]) -> None:
        kind = next((kind for kind in KINDS if kind in line), "other")
        if line["step"] <= self._former.get(kind, 0):
            return
        self._run.log({"step": line["step"], **dict(_numbers(line))})
        self._sent[kind] = line["step"]
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({"id": self._id, "sent": self._sent}))
        draft.replace(self._file)

    def show(self, images: dict[str, Path]) -> None:
        shown = {name: self._wandb.Image(str(file)) for name, file in images.items()}
        self._run.log({"step": max(self._sent.values(), default=0), **shown})

    def close(self) -> None:
        offline, directory = self._run.offline, Path(self._run.dir).parent
        self._run.finish()
        if offline:
            say(f"wandb: run stored in {directory}. Upload it with `wandb sync {directory}`.")


class _TensorBoard:
    """TensorBoard event files; steps after `step` from an earlier start are purged."""

    def __init__(self, config: RunConfig, step: int, described: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = config.run_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        self._step = step
        about = json.dumps(described["about"], indent=1)
        self._writer.add_text("config", f"<pre>{dump_config(config)}</pre>", step)
        self._writer.add_text("about", f"<pre>{about}</pre>", step)

    def log(self, line: dict[str, Any]) -> None:
        self._step = line["step"]
        for key, value in _numbers(line):
            self._writer.add_scalar(key, value, self._step)

    def show(self, images: dict[str, Path]) -> None:
        import numpy as np
        from PIL import Image

        for name, file in images.items():
            pixels = np.asarray(Image.open(file).convert("RGB"))
            self._writer.add_image(name, pixels, self._step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def _numbers(line: dict[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line except its step; nested ones as `outer/inner`."""
    for key, value in line.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{above}{key}/")
        elif isinstance(value, int | float) and (above or key != "step"):
            yield above + key, value


def public_config(config: RunConfig) -> dict[str, Any]:
    """The configuration without the credentials in its URLs, for external services."""
    return cleaned(config.model_dump(mode="json"))
