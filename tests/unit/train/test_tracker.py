"""What Weights & Biases (offline) and TensorBoard get, read back from their own files."""

import json
import shutil
import struct
import sys
import time

import pytest
from errors import raises_error

from leviathan.train import trackers as tracker
from leviathan.train.trackers import check_packages, public_config

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")

KEY = "f00d" * 10  # of the shape of an API key
BLOCK, HEADER = 32768, 7  # of the log format that .wandb files are in


def records(path):
    """The records of one .wandb file, as wandb's own protobuf classes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        whole += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def segments(run_dir):
    """Records of each start of a run; wandb writes the last ones after the run has ended."""
    deadline = time.monotonic() + 20
    while True:
        files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
        found = [list(records(file)) for file in files]
        if all(any(r.HasField("exit") for r in segment) for segment in found):
            return found
        assert time.monotonic() < deadline, "a run that never ends"
        time.sleep(0.05)


def rows(segment):
    """The history of one start: a dict a row."""
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in segment
        if record.HasField("history")
    ]


@pytest.fixture
def rewound(run_config, trained, monkeypatch):
    """A run that logged eight steps, lost its checkpoint of the eighth, and went on to twelve."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def config(steps):
        return run_config(
            steps=steps,
            train={"log_every": 1, "eval_every": 4},
            optim={"schedule": "constant"},
            checkpoint={"every": 5, "async_save": False},
            tracking={"wandb": {"project": "tests", "tags": ["small"]}, "tensorboard": True},
        )

    trained(config(8))
    run_dir = config(8).run_dir
    shutil.rmtree(run_dir / "checkpoints" / "step-00000008")
    log = trained(config(12))
    assert json.loads((run_dir / "run.json").read_text())["started_at_step"] == 5
    return run_dir, log


def test_a_rewound_run_is_one_run_whose_steps_stand_there_once(rewound):
    run_dir, log = rewound
    first, second = segments(run_dir)
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    for segment in (first, second):
        (run,) = [record.run for record in segment if record.HasField("run")]
        assert (run.run_id, run.project, list(run.tags)) == (run_id, "tests", ["small"])
        (metric,) = [r.metric for r in segment if r.HasField("metric") and r.metric.glob_name]
        assert (metric.glob_name, metric.step_metric) == ("*", "step")
    sent = [row for segment in (first, second) for row in rows(segment)]
    assert [row["step"] for row in sent if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in sent if "val_loss" in row] == [4, 8, 12]
    logged = {line["step"]: line["loss"] for line in log if "loss" in line}
    assert {row["step"]: row["loss"] for row in sent if "loss" in row} == logged

    states = run_dir.glob("checkpoints/*/state.json")
    assert {json.loads(state.read_text())["tracker_id"] for state in states} == {run_id}

    config = {u.key: json.loads(u.value_json) for u in run.config.update}
    assert config["model"]["d_model"] == 16
    about = json.loads((run_dir / "run.json").read_text())
    assert config["about"]["data_fingerprint"] == about["data_fingerprint"]
    assert config["about"]["code"].startswith("0.1.0")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))
    assert {e.step: e.value for e in events.Scalars("loss")} == pytest.approx(logged)
    assert "config/text_summary" in events.Tags()["tensors"]

    holding = [f for f in run_dir.rglob("*") if f.is_file() and KEY.encode() in f.read_bytes()]
    assert holding == []


def test_what_a_service_missed_is_sent_by_the_next_start(rewound, run_config, trained):
    """As if it had failed after step 3, and its file were of another start."""
    run_dir, _ = rewound
    sent = json.loads((run_dir / "tracking.json").read_text())
    assert sent["sent"] == {"loss": 12, "val_loss": 12}
    (run_dir / "tracking.json").write_text(json.dumps({**sent, "sent": {"loss": 3}}))
    trained(
        run_config(
            steps=13,
            train={"log_every": 1, "eval_every": 4},
            optim={"schedule": "constant"},
            tracking={"wandb": {"project": "tests"}},
        )
    )
    last = rows(segments(run_dir)[-1])
    assert [row["step"] for row in last if "loss" in row] == list(range(4, 14))
    assert [row["step"] for row in last if "val_loss" in row] == [4, 8, 12, 13]


@pytest.mark.parametrize("key", [None, KEY])
def test_without_key_or_network_the_run_is_kept_on_disk(
    run_config, trained, monkeypatch, capfd, key
):
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    else:
        monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr(tracker, "INIT_TIMEOUT_S", 3)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")  # nor a .netrc
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    config = run_config(tracking={"wandb": {"mode": "online"}})
    log = trained(config)
    assert len([line for line in log if "loss" in line]) == 5
    errors = " ".join(capfd.readouterr().err.split())
    assert errors.count("wandb is unreachable") == 1
    assert errors.count("`wandb sync") == 1
    assert len(rows(segments(config.run_dir)[0])) == len(log)
    holding = [f for f in config.run_dir.rglob("*") if f.is_file() and KEY in f.read_text("latin1")]
    assert holding == []


def test_a_service_that_fails_is_one_warning(run_config, trained, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run_config(tracking={"tensorboard": True, "wandb": {}})
    config.run_dir.mkdir()
    (config.run_dir / "tensorboard").write_text("in the way")
    (config.run_dir / "tracking.json").write_text("torn")
    log = trained(config)
    assert len([line for line in log if "loss" in line]) == 5
    errors = capfd.readouterr().err
    assert errors.count("TensorBoard failed and is disabled") == 1
    assert errors.count("wandb failed and is disabled") == 1


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_told_before_training(run_config, monkeypatch, package):
    tracking = run_config(tracking={"wandb": {}, "tensorboard": True}).tracking
    check_packages(tracking)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    loaded = {name: m for name, m in sys.modules.items() if not name.startswith(package)}
    monkeypatch.setattr(sys, "modules", loaded)
    other = {"wandb": {"tensorboard": False}, "tensorboard": {"wandb": None}}[package]
    with raises_error("tracking.not_installed", f"'leviathan[{package}]'"):
        check_packages(tracking.model_copy(update=other))


def test_plots_of_the_report_are_attached(run_config, trained, monkeypatch, tmp_path):
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    plot = tmp_path / "curves.png"
    Image.new("RGB", (4, 3), (10, 20, 30)).save(plot)
    run_dir = run_config(tracking={"tensorboard": True, "wandb": {}}).run_dir
    trained(run_config(tracking={"tensorboard": True, "wandb": {}}))
    time.sleep(1.1)  # wandb names the folder of a start after its second
    assert tracker.attach(run_dir, {"report/curves": plot})
    (row,) = rows(segments(run_dir)[-1])
    assert row["step"] == 8
    assert row["report/curves/_type"] == "image-file"
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    (image,) = events.Images("report/curves")
    assert (image.step, image.width, image.height) == (8, 4, 3)
    assert len(events.Scalars("loss")) == 5

    other = run_config("other")
    trained(other)
    assert not tracker.attach(other.run_dir, {"report/curves": plot})
    assert not tracker.attach(tmp_path, {"report/curves": plot})


def test_credentials_in_a_url_stay_here(run_config):
    config = run_config("run")
    data = config.data.model_copy(update={"remote": "s3://key:secret@store/a"})
    shown = public_config(config.model_copy(update={"data": data}))
    assert shown["data"]["remote"] == "s3://***@store/a"
