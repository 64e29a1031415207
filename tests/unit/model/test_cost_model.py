"""Bytes on the wire, step times and recommendations against numbers worked out by hand."""

import json
from pathlib import Path

import pytest
from errors import raises_error
from test_parallel_layout import NORM, TABLE, N, model
from typer.testing import CliRunner

from leviathan.config.load import load_config
from leviathan.config.run import ModelFile
from leviathan.estimate.cost_model import USABLE_MEMORY, Hardware, estimate, recommend, traffic
from leviathan.estimate.layout import ParallelLayout
from leviathan.estimate.params import count_params

CONFIGS = Path(__file__).parents[3] / "configs"


def preset(name):
    return load_config(CONFIGS / f"model/{name}.yaml", [], ModelFile).model


SENT = {
    # layout, micro-batches: bytes over the ranks that hold one copy, and over copies
    "ZeRO-0": (ParallelLayout(4, zero_stage=0), 3, 0, 2 * 4 * N * 3 / 4),
    "ZeRO-1": (ParallelLayout(4, zero_stage=1), 3, (4 + 2) * N * 3 / 4, 0),
    "ZeRO-2": (ParallelLayout(4, zero_stage=2), 3, (3 * 4 + 2) * N * 3 / 4, 0),
    "ZeRO-3": (ParallelLayout(4, zero_stage=3), 3, 3 * (4 + 2 * 2) * N * 3 / 4, 0),
    # The head's group stays gathered from the forward to the backward pass.
    "FSDP2": (
        ParallelLayout(4, engine="fsdp2"),
        1,
        (4 * N + 2 * (2 * N - TABLE - NORM)) * 3 / 4,
        0,
    ),
    "HSDP": (
        *(ParallelLayout(4, engine="fsdp2", dp_replicate=2), 1),
        *((4 * N + 2 * (2 * N - TABLE - NORM)) / 2, 2 * (4 * N / 2) / 2),
    ),
    "one rank": (ParallelLayout(1, zero_stage=1), 3, 0, 0),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_on_the_wire(name):
    layout, micro_batches, shard, replicate = SENT[name]
    sent = traffic(model(), layout, micro_batches)
    assert (sent.tensor, sent.shard, sent.replicate) == (0, shard, replicate)


def test_tensor_parallel_bytes():
    # 3 blocks × 4 sums and 2 more, of 2 · 16 tokens × 8 in bf16; two ranks send the size once.
    sent = traffic(model(), ParallelLayout(2, tp=2, micro_batch_size=2), 5)
    # The norms are whole everywhere: 3 · 16 + 8 gradients in fp32, once a step.
    assert sent.tensor == 5 * 14 * (2 * 16 * 8 * 2) + 4 * 56
    again = traffic(model(), ParallelLayout(2, tp=2, micro_batch_size=2, recompute=True), 5)
    assert again.tensor == 5 * 20 * (2 * 16 * 8 * 2) + 4 * 56
    assert sent.shard == 0


def test_seconds_share_and_break_even():
    hardware = Hardware(ranks_per_node=2, flops=1e9, mfu=0.5, intra=1e9, inter=1e6)
    found = estimate(model(), ParallelLayout(4, zero_stage=1), 12, hardware)
    per_row = count_params(model()).flops_per_token * 16 / 0.5e9
    assert found.micro_batches == 3
    assert found.compute_s == pytest.approx(3 * per_row)
    assert found.communication_s == pytest.approx(6 * N * 3 / 4 / 1e6)  # crosses nodes
    share = found.communication_s / (found.communication_s + 3 * per_row)
    assert found.communication_share == pytest.approx(share)
    assert found.scales_from == 4 * round(found.communication_s / per_row)
    inside = estimate(model(), ParallelLayout(2, zero_stage=1), 12, hardware)
    assert inside.communication_s == pytest.approx(6 * N / 2 / 1e9)
    # What is sent with every micro-batch no batch outgrows.
    assert estimate(model(), ParallelLayout(4, engine="fsdp2"), 12, hardware).scales_from is None


def test_a_batch_smaller_than_the_ranks_is_told():
    with raises_error("parallel.batch_too_small"):
        estimate(model(), ParallelLayout(4), 3, Hardware())


@pytest.mark.parametrize("name", ["400m", "1.2b"])
@pytest.mark.parametrize("world_size", [8, 64, 512, 4096])
def test_a_layout_is_found_at_every_size(name, world_size):
    found = recommend(preset(name), world_size, 512, Hardware())
    layout = found.layout
    assert found.memory.total <= USABLE_MEMORY * 80e9
    assert layout.dp * layout.tp == world_size
    assert layout.dp <= 512
    assert layout.tp <= 8
    other = estimate(
        preset(name), ParallelLayout(8, zero_stage=1, micro_batch_size=1), 512, Hardware()
    )
    if world_size == 8:
        assert found.step_s <= 1.03 * other.step_s


def test_less_memory_makes_it_cut_more():
    roomy = recommend(preset("1.2b"), 8, 512, Hardware())
    tight = recommend(preset("1.2b"), 8, 512, Hardware(memory_bytes=8e9))
    assert tight.memory.total <= USABLE_MEMORY * 8e9 < roomy.memory.total
    with raises_error("parallel.indivisible"):
        recommend(preset("1.2b"), 8, 512, Hardware(memory_bytes=1e9))
    only = recommend(preset("1.2b"), 8, 512, Hardware(), tp=4)
    assert only.layout.tp == 4


def test_the_command():
    from leviathan.cli import app

    run = ["params", str(CONFIGS / "run/pile_1.2b.yaml"), "--world-size", "64", "--json"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["params"]["total"] == 1_217_981_568
    assert report["layouts"].keys() == {"as configured", "recommended"}
    for layout in report["layouts"].values():
        parts = {k: v for k, v in layout["memory"].items() if k != "total"}
        assert layout["memory"]["total"] == sum(parts.values())
        assert 0 < layout["communication_share"] < 1
    shown = CliRunner().invoke(app, run[:-1])
    assert "communication, ms" in shown.stdout
    assert "450 GB/s inside" in shown.stdout
