"""The Triton kernels, under Triton's interpreter, against the reference in float64."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leviathan.model.kernels import lev as select
from leviathan.model.kernels.cpu import BlockedModes

pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[4]
TOLERANCE = 1e-5  # of the largest entry; fp32 products of up to a dozen factors, sums of 150
WIDE_TOLERANCE = 1e-3  # 1 - 0.99 is 0.01 to 6e-6 only in fp32; 64 such factors
SM_90 = 90


def test_values_and_all_gradients_and_the_same_bits_twice():
    out = subprocess.run(
        [sys.executable, Path(__file__).with_name("fused_cases.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    results = [json.loads(line) for line in out.stdout.splitlines()]
    assert len(results) == 7
    for result in results:
        assert result["same"], result["case"]
        tolerance = WIDE_TOLERANCE if result["case"] == "wide range" else TOLERANCE
        for name, error in result["errors"].items():
            assert error < tolerance, f"{result['case']}: {name}"


@pytest.mark.parametrize("kernel", ["_forward_kernel", "_backward_kernel"])
def test_compiles_for_hopper_within_its_shared_memory(kernel):
    """Needs no GPU: Triton brings its assembler along."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from leviathan.model.kernels import triton as fused

    modes = fused.FusedModes(torch.empty(8, 128, 16, 64), 8192, gradient=True)
    constants = modes._sizes | ({"KNOT_COLUMNS": 16} if "backward" in kernel else {})
    function = getattr(fused, kernel)
    integers = {"n_ids": "i32", "n_tiles": "i32", "exponents": "*i32"}
    signature = {
        name: "constexpr" if name in constants else integers.get(name, "*fp32")
        for name in function.arg_names
    }
    source = ASTSource(function, signature=signature, constexprs=constants)
    warps = fused.BACKWARD_WARPS if "backward" in kernel else fused.FORWARD_WARPS
    built = compile(source, target=GPUTarget("cuda", SM_90, 32), options={"num_warps": warps})
    assert built.asm["cubin"]
    assert built.metadata.shared <= 48 * 1024


def test_what_the_kernels_cannot_take_is_said():
    from leviathan.model.kernels import triton as fused

    assert fused.unsupported_reason(torch.empty(8, 128, 16, 64)) is None
    assert "float64" in str(fused.unsupported_reason(torch.empty(1, 1, 4, 4, dtype=torch.float64)))
    assert "rank 500" in str(fused.unsupported_reason(torch.empty(1, 1, 4, 500)))
    assert "99 knots" in str(fused.unsupported_reason(torch.empty(1, 1, 99, 4)))


def test_cpu_takes_the_portable_path_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        assert isinstance(select.lev_backend(torch.ones(1, 1, 4, 4), 3, False), BlockedModes)
    assert not caplog.records


def test_a_fall_back_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        select._warn_once("for this test")
        select._warn_once("for this test")
    assert [r.getMessage() for r in caplog.records] == [
        "the fused LEV kernel is not used: for this test"
    ]
