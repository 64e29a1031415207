"""Who is still there: one connection from every rank to rank 0, beside the training's own.

A collective that waits for a dead rank says nothing for as long as the process group's timeout, and
then not who is missing. Here each rank says every second that it lives. A process that ends closes
its connection, so that is known at once; a machine that is cut off falls silent, and is given up
after `parallel.heartbeat_timeout_s`. Then every remaining rank exits with status 1, whatever its
main thread waits for, after a message that names the lost ranks.
"""

import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from leviathan.console import console, say
from leviathan.errors import LeviathanError
from leviathan.parallel.mesh import Mesh

CONNECT_S = 5.0  # to one address of rank 0
REPORT_DELAY_S = 1.0  # the ranks of a lost machine fall one after the other: name them together
LOST_RANK_GRACE_S = (
    5.0  # how long an error waits for the word that a rank is gone, which explains it
)
STATUS = 1
WELCOME = b"welcome\n"
CROWD = 4096  # ranks that may knock at once


@dataclass
class _Peer:
    """The other end of a connection; `rank` is None until it has said who it is."""

    rank: int | None
    heard: float
    unread: bytes = b""
    left: bool = False  # it said goodbye: its end is no loss


@dataclass(frozen=True)
class _Invitation:
    """Where rank 0 listens, and the word that tells its run from any other."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclass
class HeartbeatMonitor:
    """Watches the other ranks while used as a context. Entering and leaving are collective.

    Args:
        mesh: the ranks.
        heartbeat_timeout_s: seconds of silence after which a rank is lost.
        advice: the end of the message.
    """

    mesh: Mesh
    heartbeat_timeout_s: float
    advice: str
    _peers: dict[socket.socket, _Peer] = field(default_factory=dict, init=False)
    _hosts: list[str] = field(default_factory=list, init=False)
    _lost: dict[int, str] = field(default_factory=dict, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> "HeartbeatMonitor":
        if self.mesh.world_size == 1:
            return self
        self._hosts = self.mesh.gather(socket.gethostname())
        server = _listen() if self.mesh.rank == 0 else None
        invitation = None
        if server is not None:
            port = server.getsockname()[1]
            invitation = _Invitation(_addresses(), port, secrets.token_hex(16))
        invitation = self.mesh.broadcast(invitation)
        assert invitation is not None
        self._token = invitation.token
        self._thread = threading.Thread(target=self._run, args=(server,), daemon=True, name="watch")
        if server is not None:
            self._thread.start()
        reached = server is not None or self._join(invitation)
        if server is None and reached:
            self._thread.start()
        alone = [rank for rank, there in enumerate(self.mesh.gather(reached)) if not there]
        if alone:
            say(
                f"rank(s) {_some(alone)} cannot reach rank 0 at port {invitation.port} of any of "
                f"{', '.join(invitation.addresses)}: should they be lost, that shows only after "
                "parallel.collective_timeout_s",
                style="yellow",
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.mesh.world_size == 1:
            return
        if kind is not None and not issubclass(kind, LeviathanError):
            # This rank's own error, or a collective that failed because a rank is gone: then the
            # thread ends the process. No goodbye: the others must see the connection break.
            if issubclass(kind, Exception):
                time.sleep(LOST_RANK_GRACE_S)
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for connection in self._peers:
            connection.close()

    # ------------------------------------------------------------ the thread

    def _join(self, invitation: _Invitation) -> bool:
        """Connects to rank 0 under the first of its addresses that answers."""
        for address in invitation.addresses:
            with suppress(OSError):
                connection = socket.create_connection((address, invitation.port), CONNECT_S)
                connection.sendall(f"{invitation.token} {self.mesh.rank}\n".encode())
                said = connection.recv(64)
                if said.startswith(WELCOME):
                    unread = said.removeprefix(WELCOME)
                    self._peers[connection] = _Peer(0, time.monotonic(), unread)
                    return True
                connection.close()
        return False

    def _run(self, server: socket.socket | None) -> None:
        """Says that this rank lives, and hears the others, until it is over or one is lost."""
        beat_s = min(1.0, self.heartbeat_timeout_s / 5)
        with selectors.DefaultSelector() as selector:
            for connection in (server, *self._peers):
                if connection is not None:
                    selector.register(connection, selectors.EVENT_READ)
            beaten, verdict_at = 0.0, None
            while not self._over.is_set():
                now = time.monotonic()
                if now - beaten >= beat_s:
                    beaten = now
                    self._tell("alive")
                    self._note_silence(now)
                for key, _ in selector.select(beat_s / 4):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is server:
                        with suppress(OSError):
                            accepted, _ = connection.accept()
                            self._peers[accepted] = _Peer(None, now)
                            selector.register(accepted, selectors.EVENT_READ)
                    elif not self._hear(connection):
                        selector.unregister(connection)
                        del self._peers[connection]
                        connection.close()
                if self._lost and verdict_at is None:
                    verdict_at = now + (REPORT_DELAY_S if self.mesh.rank == 0 else 0)
                if verdict_at is not None and now >= verdict_at:
                    self._end()
            self._tell("bye")
        if server is not None:
            server.close()

    def _tell(self, line: str) -> None:
        for connection, peer in self._peers.items():
            if peer.rank is not None:
                with suppress(OSError):  # its end is noticed where we listen to it
                    connection.sendall(f"{line}\n".encode())

    def _note_silence(self, now: float) -> None:
        for peer in self._peers.values():
            if (
                not peer.left
                and peer.rank is not None
                and now - peer.heard > self.heartbeat_timeout_s
            ):
                self._lost.setdefault(
                    peer.rank, f"has been silent for {self.heartbeat_timeout_s:g} s"
                )

    def _hear(self, connection: socket.socket) -> bool:
        """Takes what a peer has said; False once there is nothing more to come."""
        peer = self._peers[connection]
        try:
            said = connection.recv(4096)
        except OSError:
            said = b""
        if not said:
            if peer.rank is not None and not peer.left:
                self._lost.setdefault(peer.rank, "is gone")
            return False
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + said).split(b"\n")
        for line in lines:
            word, *rest = line.decode(errors="replace").split(" ")
            if peer.rank is None:
                if word != self._token or not rest:
                    return False
                peer.rank = int(rest[0])
                connection.sendall(WELCOME)
            elif word == "bye":
                peer.left = True
            elif word == "lost":
                rank, how = int(rest[0]), " ".join(rest[1:])
                self._lost.setdefault(rank, how)
        return True

    def _end(self) -> None:
        """Tells the others and the user who is missing, and ends this process."""
        for rank, how in self._lost.items():
            self._tell(f"lost {rank} {how}")
        # Without rank 0 no one speaks for all.
        if self.mesh.rank == 0 or 0 in self._lost:
            who = "; ".join(
                f"rank {rank} on {self._hosts[rank]} {how}"
                for rank, how in sorted(self._lost.items())[:16]
            )
            console.print(
                f"error[parallel.rank_lost]: rank {self.mesh.rank} of {self.mesh.world_size}: "
                f"{who}. {self.advice}",
                style="red",
                markup=False,
            )
        console.show_cursor(True)
        sys.stdout.flush()
        # Not sys.exit: the main thread may wait in a collective forever, and so would atexit.
        os._exit(STATUS)


def _listen() -> socket.socket:
    # A connection a rank: more than the usual 1,024 files where the system lets us.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a kernel without IPv6
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=CROWD
            )
    return socket.create_server(("", 0), backlog=CROWD)


def _addresses() -> tuple[str, ...]:
    """Under what names or numbers the other ranks may reach this machine, likeliest first."""
    master, own = os.environ["MASTER_ADDR"], socket.gethostname()
    found = [master]
    for name in (master, own):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing; tells which of our addresses leads there
            found.append(probe.getsockname()[0])
    found.append(own)
    return tuple(dict.fromkeys(found))


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")
