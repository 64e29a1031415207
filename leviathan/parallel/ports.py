"""Selection of a free rendezvous port."""

import random
import socket

# Linux assigns ports from 32768 upwards to outgoing connections, so that a lower port is not taken
# by one between its selection and the moment at which a rank listens on it.
PORTS = range(10000, 32768)


def free_port() -> int:
    """Returns a random TCP port of this machine on which no process listens."""
    draw = random.SystemRandom()  # two processes with the same seed must not choose the same port
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
