"""A world of one rank, for what is written for many."""

import pytest

from leviathan.parallel.launch_env import read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh
from leviathan.parallel.ports import free_port


@pytest.fixture
def mesh(monkeypatch):
    settings = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    yield init_mesh(read_launch_env(), tp=1)
    leave_mesh()
