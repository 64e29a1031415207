"""Passwords and tokens that a URL carries: good for opening it, and for no one else to see.

What opens a URL has all of it; names, messages and files have `without_credentials`. Where the two
could be mixed up, the text passes here once more: errors, everything that is said on the terminal,
and every configuration that is written.
"""

import re
from typing import Any

HIDDEN = "***"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
# `user:password@` under any scheme, and a token alone before `@`; under others that is a container.
_USER = re.compile(r"(?<=://)[^/?#@]*:[^/?#]*@|(?<=http://)[^/?#]+@|(?<=https://)[^/?#]+@")
_SECRET = re.compile(
    r"(?<=[?&;#])([^=&;#]*(?:token|secret|passw|signature|credential|auth|key)[^=&;#]*|sig|pwd)="
    r"[^&;#]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """`text` with the user part and the secret parameters of each URL in it replaced by `***`."""
    return _URL.sub(_hide, text) if "://" in text else text


def _hide(found: re.Match[str]) -> str:
    return _SECRET.sub(rf"\1={HIDDEN}", _USER.sub(f"{HIDDEN}@", found[0]))


def are_hidden(url: str) -> bool:
    """Whether this URL has been through `without_credentials` and cannot be opened any more."""
    return "://" in url and (f"://{HIDDEN}@" in url or f"={HIDDEN}" in url)


def cleaned(tree: Any) -> Any:
    """A tree of mappings, lists and texts as it may be written down."""
    if isinstance(tree, dict):
        return {cleaned(key): cleaned(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [cleaned(item) for item in tree]
    return without_credentials(tree) if isinstance(tree, str) else tree
