"""Two hosts on one machine: network namespaces with a name, an address and an sshd each.

They share the filesystem, as the nodes of a cluster do, and the process table, as no cluster does:
`processes` tells which are whose. Needs root, iproute2, openssh-server and (for pdsh) pdsh.
"""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

NAMES = ("node1", "node2")
NEEDED = ("ip", "sshd", "ssh", "ssh-keygen", "pdsh", "unshare")
# Own names for hosts and no resolver: a reverse look-up that times out takes minutes of a start.
INSIDE = (
    'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; '
    'mount --bind "$2/resolv.conf" /etc/resolv.conf; shift 2; exec "$@"'
)


def missing():
    """Why there can be no hosts here; None if there can."""
    if os.geteuid():
        return "needs root"
    lacking = [name for name in NEEDED if _path_of(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (Debian: iproute2, openssh-server, pdsh)"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "may not make network namespaces here"


def _path_of(name):
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class TwoHosts:
    """A context; `folder` contains keys and settings, and its path must be short (for a socket)."""

    def __init__(self, folder: Path):
        self.folder = folder
        number = os.getpid() % 100_000
        self.bridge = f"levbr{number}"
        self.namespaces = {name: f"lev{number}-{name}" for name in NAMES}
        self.links = {name: f"lv{number}{name[-1]}" for name in NAMES}
        self.addresses = {name: f"10.77.0.{place}" for place, name in enumerate(NAMES, 1)}
        self.sshd = {}

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("identity", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        listed = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{listed}")
        (self.folder / "resolv.conf").write_text("")
        self._client()
        try:
            _run("ip", "link", "add", self.bridge, "type", "bridge")
            _run("ip", "link", "set", self.bridge, "up")
            for name in NAMES:
                self._wire(name)
                self.start_sshd(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name, namespace in self.namespaces.items():
            with suppress(subprocess.CalledProcessError):
                self.kill(name)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def _client(self):
        """An `ssh` with keys and settings, before that of the system in PATH."""
        config = self.folder / "ssh_config"
        config.write_text(
            f"Host *\n  IdentityFile {self.folder / 'identity'}\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        wrapper = self.folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {_path_of("ssh")} -F {config} "$@"\n')
        wrapper.chmod(0o755)

    def _wire(self, name):
        namespace, link = self.namespaces[name], self.links[name]
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", link, "master", self.bridge, "up")
        inside = ("ip", "-n", namespace)
        _run(*inside, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")

    # ------------------------------------------------------------ what a test does

    def on(self, name, *command):
        """The command, to be run on that host."""
        namespace = self.namespaces[name]
        head = ("ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", INSIDE, "_")
        return [*head, name, str(self.folder), *map(str, command)]

    def environment(self, **more):
        """For processes that must find our ssh."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, **more}

    def start_sshd(self, name):
        config = self.folder / f"sshd-{name}.conf"
        config.write_text(
            f"ListenAddress {self.addresses[name]}\nHostKey {self.folder / 'host'}\n"
            f"PidFile none\nAuthorizedKeysFile {self.folder / 'identity.pub'}\nStrictModes no\n"
            "UsePAM no\nPermitRootLogin prohibit-password\n"
        )
        self.sshd[name] = subprocess.Popen(
            self.on(name, _path_of("sshd"), "-D", "-e", "-f", config),
            stderr=(self.folder / f"sshd-{name}.log").open("a"),
        )
        deadline = time.monotonic() + 10
        address = self.addresses[name]
        probe = f"exec 3<>/dev/tcp/{address}/22"
        while time.monotonic() < deadline:
            if subprocess.run(self.on(name, "bash", "-c", probe), capture_output=True).returncode:
                time.sleep(0.1)
            else:
                return
        raise AssertionError((self.folder / f"sshd-{name}.log").read_text())

    def processes(self, name):
        """Ids of the processes on that host, except its sshd."""
        pids = [int(word) for word in _run("ip", "netns", "pids", self.namespaces[name]).split()]
        sshd = self.sshd.get(name)
        return [pid for pid in pids if sshd is None or pid != sshd.pid]

    def kill(self, name):
        """Power off: every process of the host dies at once, its sshd too."""
        for pid in map(int, _run("ip", "netns", "pids", self.namespaces[name]).split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if sshd := self.sshd.pop(name, None):
            sshd.wait()

    def cut(self, name):
        """Disconnects the network: processes that wait for this host receive nothing more."""
        _run("ip", "link", "set", self.links[name], "down")

    def repair(self, name):
        """The cable is back."""
        _run("ip", "link", "set", self.links[name], "up")
