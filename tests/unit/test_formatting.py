import pytest

from leviathan.formatting import format_bytes, format_clock, format_count, format_duration
from leviathan.hardware import DEVICES, find_device


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(999), "999 bytes"),
        (format_bytes(1_500), "1.5 kB"),
        (format_bytes(1.5e9), "1.5 GB"),
        (format_bytes(2.5e15), "2,500.0 TB"),
        (format_count(999), "999"),
        (format_count(1_234_567), "1.23M"),
        (format_count(3e12), "3T"),
        (format_duration(1.23), "1.2 s"),
        (format_duration(5400), "1.5 hours"),
        (format_duration(86400 * 20), "20.0 days"),
        (format_clock(5400), "1:30:00"),
        (format_clock(100 * 3600 + 61), "100:01:01"),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_devices_are_found_in_the_names_that_drivers_report() -> None:
    assert find_device("NVIDIA H200") == DEVICES["h200"]
    assert find_device("NVIDIA A100-SXM4-80GB") == DEVICES["a100"]
    assert find_device("cpu") is None
