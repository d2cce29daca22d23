"""One request to a running gateway's admin address, for the commands that talk to it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from shared.core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT_S: Final = 5.0
# By the status code of a refusal.
_HINTS: Final = {401: "; give --admin-key-file", 404: "; is that a gateway's admin address, not its public one?"}


@dataclass(frozen=True, slots=True)
class AdminClient:
    url: str
    key: str | None

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON object of the reply.

        Raises `StartError` with the gateway's own words where it has some, `ConfigError` for an address that is no URL.
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
            reason = getattr(error, "reason", error)
            raise StartError(f"no gateway answers at {url}: {reason}; --admin says where to ask") from None
        if not isinstance(answer, dict):
            raise StartError(f"{url} is not a gateway's admin address")
        return answer


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return f": {orjson.loads(error.read())['detail']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def admin_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--admin` and `--admin-key-file`."""
    address = click.option(
        "--admin",
        default="http://127.0.0.1:8001",
        show_default=True,
        metavar="URL",
        help="The gateway's admin address.",
    )
    key_file = click.option(
        "--admin-key-file", metavar="PATH", help="File with the admin key, for a gateway that was started with one."
    )
    return address(key_file(function))


def admin_client(url: str, key_file: str | None) -> AdminClient:
    """Raises `StartError` when the key cannot be read."""
    return AdminClient(url, _key(key_file or os.environ.get("GATEWAY_ADMIN_KEY_FILE")))


def _key(path: str | None) -> str | None:
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise StartError(f"--admin-key-file: {path!r} cannot be read: {error.strerror}") from None
