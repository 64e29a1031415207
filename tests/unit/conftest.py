"""A world of one rank for code that is written for many ranks."""

import os

import pytest

from leviathan.parallel.launch_env import free_port, read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHER_VARIABLES += ("MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def restored_launcher_variables():
    """Training in this process sets a port, which processes of later tests would all inherit."""
    before = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def mesh(monkeypatch):
    settings = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    yield init_mesh(read_launch_env(), tp=1)
    leave_mesh()
