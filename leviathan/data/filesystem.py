"""Local and remote filesystems through fsspec: `s3://`, `hf://`, `https://`, `file://`, …"""

from typing import Any

from leviathan.credentials import HIDDEN, are_hidden
from leviathan.errors import DataError

_EXTRAS = {
    "s3": "pip install 'leviathan[s3]'",
    "gs": "pip install gcsfs",
    "az": "pip install adlfs",
}


def open_filesystem(url: str) -> tuple[Any, str]:
    """Returns the filesystem of a URL or local path, and the path in it.

    Raises:
        DataError: the protocol is unknown, the server is unreachable, or a package is not
            installed.
    """
    import fsspec.core

    if are_hidden(url):
        raise DataError(
            "url.hidden_credentials",
            f"{url}: {HIDDEN} replaces a password or token, which a stored configuration does not "
            "contain: set the complete URL again",
        )
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        import aiohttp

        # The default limit of five minutes applies to a complete file.
        options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_read=60)}
    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        hint = _EXTRAS.get(protocol)
        raise DataError(
            "url.missing_package",
            f"{url}: reading {protocol}:// needs a package that is not installed: {hint or error}",
        ) from None
    except ValueError as error:
        raise DataError(
            "url.unknown_protocol", f"{url}: unsupported protocol {protocol}:// ({error})"
        ) from None
    except Exception as error:
        raise DataError(
            "url.unreachable", f"{url}: cannot be reached ({readable_error(error)})"
        ) from None


def readable_error(error: Exception) -> OSError:
    """Converts the exception of a filesystem library to an error with a reason."""
    if isinstance(error, OSError) and error.strerror:
        return error
    return OSError(f"{type(error).__name__}: {error}".rstrip(": "))
