"""Hostfiles in DeepSpeed's format: `name slots=N`, one host per line."""

import re
from dataclasses import dataclass
from pathlib import Path

from leviathan.errors import ConfigError

_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.:-]+)\s+slots=(?P<slots>\d+)")
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A host and its number of ranks."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """True for a loopback name of this machine, which needs no ssh."""
        return self.name in LOCAL


def read_hostfile(path: Path) -> list[Host]:
    """Reads the hosts in the order of the file; blank lines and `#` comments are ignored.

    Raises:
        ConfigError: the file is unreadable, empty or invalid; the message lists all invalid lines.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "hostfile.unreadable", f"hostfile {path}: cannot be read: {error}"
        ) from None
    hosts: dict[str, Host] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if not match or match["name"].startswith("-"):
            wrong.append(f"{path}:{number}: {entry!r}: expected `name slots=N`")
        elif int(match["slots"]) == 0:
            wrong.append(f"{path}:{number}: {match['name']} has 0 slots; remove the line")
        elif match["name"] in hosts:
            wrong.append(f"{path}:{number}: duplicate host {match['name']}")
        else:
            hosts[match["name"]] = Host(match["name"], int(match["slots"]))
    if wrong:
        raise ConfigError("hostfile.invalid", "\n".join(wrong))
    if not hosts:
        raise ConfigError(
            "hostfile.empty", f"hostfile {path}: no hosts; expected lines like `node1 slots=8`"
        )
    return list(hosts.values())
