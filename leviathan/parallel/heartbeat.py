"""Heartbeats: one connection from every rank to rank 0, separate from the process group.

A collective that waits for a dead rank blocks until the process group's timeout, and then does not
name the missing rank. Here each rank sends a heartbeat every second. The connection of a process
that exits is closed, which is detected immediately; a node that becomes unreachable is lost after
`parallel.heartbeat_timeout_s` without a heartbeat. Then every remaining rank prints which ranks are
lost and exits with status 1, even if its main thread is blocked.
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

CONNECT_S = 5.0  # timeout per address of rank 0
REPORT_DELAY_S = 1.0  # the ranks of a lost node disappear one after the other: report them together
LOST_RANK_GRACE_S = 5.0  # how long an error waits for the report of a lost rank, which explains it
STATUS = 1
WELCOME = b"welcome\n"
CROWD = 4096  # listen backlog: ranks that may connect simultaneously


@dataclass
class _Peer:
    """The other end of a connection; `rank` is None until it has identified itself."""

    rank: int | None
    heard: float
    unread: bytes = b""
    left: bool = False  # it announced its exit, so its disconnection is not a loss


@dataclass(frozen=True)
class _Invitation:
    """The addresses of rank 0, and the token that identifies its run."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclass
class HeartbeatMonitor:
    """Context manager that monitors the other ranks. Entering and leaving are collective.

    Args:
        mesh: the process mesh.
        heartbeat_timeout_s: seconds without a heartbeat after which a rank is lost.
        advice: instructions at the end of the error message.
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
        isolated = [rank for rank, there in enumerate(self.mesh.gather(reached)) if not there]
        if isolated:
            say(
                f"warning: rank(s) {_some(isolated)} cannot connect to rank 0 at port "
                f"{invitation.port} of any of {', '.join(invitation.addresses)}: the loss of these "
                "ranks is detected only after parallel.collective_timeout_s",
                style="yellow",
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.mesh.world_size == 1:
            return
        if kind is not None and not issubclass(kind, LeviathanError):
            # An error of this rank, or a collective that failed because a rank is lost: then the
            # thread ends the process. Without "bye", the other ranks detect the disconnection.
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
        """Connects to rank 0 at the first of its addresses that answers."""
        for address in invitation.addresses:
            with suppress(OSError):
                connection = socket.create_connection((address, invitation.port), CONNECT_S)
                connection.sendall(f"{invitation.token} {self.mesh.rank}\n".encode())
                answer = connection.recv(64)
                if answer.startswith(WELCOME):
                    unread = answer.removeprefix(WELCOME)
                    self._peers[connection] = _Peer(0, time.monotonic(), unread)
                    return True
                connection.close()
        return False

    def _run(self, server: socket.socket | None) -> None:
        """Sends heartbeats and receives those of the others, until the end or a loss."""
        beat_s = min(1.0, self.heartbeat_timeout_s / 5)
        with selectors.DefaultSelector() as selector:
            for connection in (server, *self._peers):
                if connection is not None:
                    selector.register(connection, selectors.EVENT_READ)
            beaten, report_at = 0.0, None
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
                if self._lost and report_at is None:
                    report_at = now + (REPORT_DELAY_S if self.mesh.rank == 0 else 0)
                if report_at is not None and now >= report_at:
                    self._end()
            self._tell("bye")
        if server is not None:
            server.close()

    def _tell(self, line: str) -> None:
        for connection, peer in self._peers.items():
            if peer.rank is not None:
                with suppress(OSError):  # the disconnection is detected when receiving
                    connection.sendall(f"{line}\n".encode())

    def _note_silence(self, now: float) -> None:
        for peer in self._peers.values():
            if (
                not peer.left
                and peer.rank is not None
                and now - peer.heard > self.heartbeat_timeout_s
            ):
                self._lost.setdefault(
                    peer.rank, f"sent no heartbeat for {self.heartbeat_timeout_s:g} s"
                )

    def _hear(self, connection: socket.socket) -> bool:
        """Receives the messages of a peer; False once the connection is closed."""
        peer = self._peers[connection]
        try:
            received = connection.recv(4096)
        except OSError:
            received = b""
        if not received:
            if peer.rank is not None and not peer.left:
                self._lost.setdefault(peer.rank, "disconnected")
            return False
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + received).split(b"\n")
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
        """Reports the lost ranks to the other ranks and the user, and ends this process."""
        for rank, how in self._lost.items():
            self._tell(f"lost {rank} {how}")
        # Only rank 0 prints, unless it is lost itself.
        if self.mesh.rank == 0 or 0 in self._lost:
            who = "; ".join(
                f"rank {rank} on {self._hosts[rank]} {how}"
                for rank, how in sorted(self._lost.items())[:16]
            )
            console.print(
                f"error: [parallel.rank_lost] rank {self.mesh.rank} of {self.mesh.world_size}: "
                f"{who}. {self.advice}",
                style="red",
                markup=False,
            )
        console.show_cursor(True)
        sys.stdout.flush()
        # Not sys.exit: the main thread may block in a collective, and atexit handlers would too.
        os._exit(STATUS)


def _listen() -> socket.socket:
    # One connection per rank: raise the usual limit of 1,024 files as far as permitted.
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
    """Names and addresses at which other ranks may reach this node, most likely first."""
    master, own = os.environ["MASTER_ADDR"], socket.gethostname()
    found = [master]
    for name in (master, own):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing; selects the source address of this route
            found.append(probe.getsockname()[0])
    found.append(own)
    return tuple(dict.fromkeys(found))


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")
