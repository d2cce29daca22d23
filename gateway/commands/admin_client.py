"""Requests to the admin address of a running gateway, for the commands that use it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from shared.core.errors import ConfigError, StartError
from shared.system_error import system_reason

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT_S: Final = 5.0
# Status code of a refusal -> hint.
_HINTS: Final = {401: "; give --admin-key-file", 404: "; is this the admin address of a gateway, not its public one?"}


@dataclass(frozen=True, slots=True)
class AdminClient:
    url: str
    key: str | None

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request and return the JSON object of the reply.

        Raises `StartError`, with the gateway's reason if it gives one, and `ConfigError` if the address is not a URL.
        """
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--admin: {self.url!r} is not allowed; give a URL such as http://127.0.0.1:8001")
        url = self.url.rstrip("/") + path
        try:
            request = urllib.request.Request(url, headers={"X-Admin-Key": self.key} if self.key else {}, method=method)
            data = orjson.dumps(body) if body is not None else None
            with urllib.request.urlopen(request, data, timeout=_TIMEOUT_S) as reply:
                answer = orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise StartError(f"{url} answered {error.code}{_HINTS.get(error.code) or _detail(error)}") from None
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)
            reason = system_reason(cause) if isinstance(cause, OSError) else cause
            raise StartError(f"no gateway answers at {url}: {reason}; give its admin address with --admin") from None
        if not isinstance(answer, dict):
            raise StartError(f"{url} is not the admin address of a gateway")
        return answer


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return f": {orjson.loads(error.read())['detail']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def admin_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--admin` and `--admin-key-file`."""
    address = click.option(
        "--admin",
        default="http://127.0.0.1:8001",
        show_default=True,
        metavar="URL",
        help="Admin address of the gateway.",
    )
    key_file = click.option(
        "--admin-key-file", metavar="PATH", help="File with the admin key, if the gateway was started with one."
    )
    return address(key_file(function))


def admin_client(url: str, key_file: str | None) -> AdminClient:
    """Return a client for the options above. Raises `StartError` if the key file cannot be read."""
    return AdminClient(url, _key(key_file or os.environ.get("GATEWAY_ADMIN_KEY_FILE")))


def _key(path: str | None) -> str | None:
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise StartError(f"--admin-key-file: {path!r} cannot be read: {error.strerror}") from None
