"""Accelerators according to the data sheets: memory, dense bf16 peak and memory bandwidth."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        memory_bytes: device memory.
        flops: peak of dense bf16 matrix products, FLOP/s.
        bandwidth: bandwidth of the device memory, bytes/s.
    """

    memory_bytes: float
    flops: float
    bandwidth: float


# SXM modules; longer names are matched first
DEVICES = {
    "a100": Device(80e9, 312e12, 2.04e12),
    "a100-40": Device(40e9, 312e12, 1.56e12),
    "h100": Device(80e9, 989e12, 3.35e12),
    "h200": Device(141e9, 989e12, 4.8e12),
    "b200": Device(180e9, 2250e12, 8e12),
}


def find_device(name: str) -> Device | None:
    """The device whose name is part of `name` ("NVIDIA H100 80GB HBM3"); None if unknown."""
    return next((device for known, device in DEVICES.items() if known in name.lower()), None)
