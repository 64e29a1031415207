"""A port for ranks to meet at."""

import random
import socket

# Linux takes the ports of outgoing connections from 32768 upwards; a port below is not taken by
# one between the moment that it is chosen and the moment that a rank listens on it.
PORTS = range(10000, 32768)


def free_port() -> int:
    """A TCP port of this machine that no one listens on now, and that few others will choose."""
    draw = random.SystemRandom()  # two processes with the same seed must not choose the same port
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
