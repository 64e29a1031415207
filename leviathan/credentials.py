"""Removes passwords and tokens from URLs.

Only code that opens a URL has the complete URL; names, messages and files contain the result of
`without_credentials`. As a second safeguard, all errors, console output and written configurations
pass through this module.
"""

import re
from typing import Any

HIDDEN = "***"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
# `user:password@` in any scheme, and a single token before `@`; with az:// this is a container
_USER = re.compile(r"(?<=://)[^/?#@]*:[^/?#]*@|(?<=http://)[^/?#]+@|(?<=https://)[^/?#]+@")
_SECRET = re.compile(
    r"(?<=[?&;#])([^=&;#]*(?:token|secret|passw|signature|credential|auth|key)[^=&;#]*|sig|pwd)="
    r"[^&;#]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Replaces the user part and the secret parameters of each URL in `text` by `***`."""
    return _URL.sub(_hide, text) if "://" in text else text


def _hide(found: re.Match[str]) -> str:
    return _SECRET.sub(rf"\1={HIDDEN}", _USER.sub(f"{HIDDEN}@", found[0]))


def are_hidden(url: str) -> bool:
    """Whether the credentials of this URL were removed, so that it cannot be opened."""
    return "://" in url and (f"://{HIDDEN}@" in url or f"={HIDDEN}" in url)


def cleaned(tree: Any) -> Any:
    """Removes credentials from a tree of mappings, lists and texts."""
    if isinstance(tree, dict):
        return {cleaned(key): cleaned(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [cleaned(item) for item in tree]
    return without_credentials(tree) if isinstance(tree, str) else tree
