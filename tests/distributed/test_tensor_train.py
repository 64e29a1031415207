"""A complete run with matrices sharded over two ranks, resumed in one process."""

import signal

import pytest
from runs import STEPS, curve, finish, launched, lines, signal_when_at

# As in test_docs: fp32 sums in another order over 40 steps at a learning rate of 0.01.
LOSS_TOLERANCE = 1e-3
FSDP2 = "engine.kind=fsdp2"


def test_tensor_parallel_losses_are_those_without_and_a_run_moves_between(run_file):
    folder = run_file.parent
    cut, alone = f"run_dir={folder / 'cut'}", f"run_dir={folder / 'alone'}"
    with launched("torchrun", run_file, cut, FSDP2, "parallel.tp=2") as process:
        signal_when_at(folder / "cut", STEPS // 2, signal.SIGTERM)
        status, errors = finish(process)
    assert status == 0, errors
    assert "Received SIGTERM: checkpoint saved at step" in errors
    first_half = curve(folder / "cut")
    for run_dir, message in ((alone, "complete at step"), (cut, "Resuming from")):
        with launched("alone", run_file, run_dir, FSDP2) as process:
            status, errors = finish(process)
        assert status == 0, errors
        assert message in errors
    expected, found = curve(folder / "alone"), curve(folder / "cut")
    assert found.keys() == expected.keys()
    assert found.items() >= first_half.items()
    for key in ("tokens", "lr"):
        assert {k: v for k, v in found.items() if k[1] == key} == {
            k: v for k, v in expected.items() if k[1] == key
        }
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert any("val_loss" in line for line in lines(folder / "cut"))


def test_a_size_that_does_not_fit_is_one_message(run_file):
    refused = (f"run_dir={run_file.parent / 'refused'}", FSDP2, "parallel.tp=3")
    with launched("alone", run_file, *refused) as process:
        status, errors = finish(process)
    assert status == 2
    assert errors.count("error:") == 1, errors
    assert "parallel.tp=3 does not divide model.n_heads (2)" in errors
    assert "Traceback" not in errors
    assert not (run_file.parent / "refused").exists()
