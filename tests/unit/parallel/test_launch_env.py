import pytest

from leviathan.errors import ConfigError
from leviathan.parallel.launch_env import LaunchEnv, read_launch_env


def test_alone_is_a_world_of_one():
    environ = {}
    assert read_launch_env(environ) == LaunchEnv(0, 0, 1, 1)
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(environ["MASTER_PORT"]) < 65536


COMMON = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}


def test_deepspeed_and_torchrun_name_the_local_ranks_differently():
    deepspeed = {**COMMON, "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    torchrun = {**COMMON, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch_env(deepspeed) == read_launch_env(torchrun) == LaunchEnv(3, 1, 4, 2)


def test_half_a_launcher_is_an_error():
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT"):
        read_launch_env({"RANK": "0", "WORLD_SIZE": "2"})
