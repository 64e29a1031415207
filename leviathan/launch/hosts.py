"""Hostfiles as DeepSpeed reads them: `name slots=N`, one host a line."""

import re
from dataclasses import dataclass
from pathlib import Path

from leviathan.errors import ConfigError

_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.:-]+)\s+slots=(?P<slots>\d+)")
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A machine and the number of ranks that it takes."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """True for this machine by its loopback name: no ssh is needed."""
        return self.name in LOCAL


def read_hostfile(path: Path) -> list[Host]:
    """The hosts in the order of the file; blank lines and `#` comments are passed over.

    Raises:
        ConfigError: with every line that is wrong.
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
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = _LINE.fullmatch(said)
        if not match or match["name"].startswith("-"):
            wrong.append(f"{path}:{number}: {said!r}: expected `name slots=N`")
        elif int(match["slots"]) == 0:
            wrong.append(f"{path}:{number}: {match['name']} has no slots: leave the line out")
        elif match["name"] in hosts:
            wrong.append(f"{path}:{number}: {match['name']} is named a second time")
        else:
            hosts[match["name"]] = Host(match["name"], int(match["slots"]))
    if wrong:
        raise ConfigError("hostfile.invalid", "\n".join(wrong))
    if not hosts:
        raise ConfigError(
            "hostfile.empty", f"hostfile {path}: names no host; expected lines like `node1 slots=8`"
        )
    return list(hosts.values())
