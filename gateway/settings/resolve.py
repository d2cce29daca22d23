"""Make `Settings` from flags, environment and TOML file, and say what a running gateway takes over from new ones.

A flag wins over the environment, the environment over the file, the file over the default. `resolve` is pure except
for `read_text`, which the caller hands in. An invalid value raises `ConfigError` with one line: where the value was
found, the value, and what is allowed. URLs that may hold a password are not repeated.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.settings.keys_file import parse_keys
from gateway.settings.table import BY_KEY, FLAGS
from gateway.settings.urls import is_loopback
from shared.config import Settings
from shared.core.adapters import check_templates
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.settings.flag import Flag

CONFIG_VARIABLE: Final = "GATEWAY_CONFIG"
_VARIABLES: Final = "GATEWAY_"
# Kubernetes sets these in every container of a namespace that has a service called "gateway".
_SERVICE_LINK: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)$")
_SECRET_KEYS: Final = frozenset({"redis_url", "upstream", "training_upstream"})

# Flags whose field in `Settings` has another name.
_FIELDS: Final = {
    "upstream": "upstreams",
    "model": "models",
    "image_token": "image_tokens",
    "undelivered_ttl": "undelivered_ttl_s",
    "retrieved_ttl": "retrieved_ttl_s",
    "acked_ttl": "acked_ttl_s",
    "lease": "lease_s",
    "redis_memory": "redis_memory_bytes",
    "read_timeout": "read_timeout_s",
    "attempt_timeout": "attempt_timeout_s",
    "connect_timeout": "connect_timeout_s",
    "upstream_wait": "upstream_wait_s",
    "lora_wait": "lora_wait_s",
    "upstream_keep_alive": "upstream_keep_alive_s",
    "keep_alive": "keep_alive_s",
    "poll_timeout": "poll_timeout_s",
    "session_timeout": "session_timeout_s",
    "drain_timeout": "drain_timeout_s",
}
# Flags that name a file; `Settings` holds its content.
_FILES: Final = ("upstream_api_key_file", "training_api_key_file", "api_keys_file", "admin_key_file")
# Opened, bound or counted once at start: field of `Settings` -> flag. Replacing the workers cannot change these.
FIXED_AT_START: Final = {
    "host": "host",
    "port": "port",
    "workers": "workers",
    "source_ips": "source-ips",
    "backlog": "backlog",
    "redis_url": "redis-url",
    "redis_memory_bytes": "redis-memory",
    "key_prefix": "key-prefix",
    "admin_host": "admin-host",
    "admin_port": "admin-port",
    "admin_key": "admin-key-file",
    "run_dir": "run-dir",
}


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was found. `where` names the place for error messages."""

    texts: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Hold what the machine contributes, so that `resolve` depends on nothing but its arguments."""

    environ: Mapping[str, str]
    read_text: Callable[[str], str]
    cpus: int
    stderr_is_terminal: bool


def resolve(flags: Mapping[str, Sequence[str]], around: Surroundings, config_path: str | None = None) -> Settings:
    """Return the settings. Raises `ConfigError`.

    `flags` holds the texts of the command line by key (with underscores). A flag that was not given is absent or empty.
    """
    config_path = config_path or around.environ.get(CONFIG_VARIABLE) or None
    file = _file_values(config_path, around.read_text) if config_path else {}
    values: dict[str, Any] = {}
    for flag in FLAGS:
        given = _given(flag, flags, around.environ) or file.get(flag.key)
        if given is not None:
            values[flag.key] = _parsed(flag, given)
    settings = _settings(values, around)
    check_together(settings, tls_given=("tls_cert" in values, "tls_key" in values))
    return settings


def _given(flag: Flag, flags: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Given | None:
    if texts := flags.get(flag.key):
        return Given(tuple(texts), f"--{flag.name}")
    # Unit and compose files leave a variable empty when it is not set.
    if text := environ.get(flag.variable):
        texts = tuple(text.replace(",", " ").split()) if flag.repeatable else (text,)
        return Given(texts, f"{flag.variable} (--{flag.name})")
    return None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that starts with GATEWAY_ and means nothing, most likely a typing error."""
    known = [CONFIG_VARIABLE, *(flag.variable for flag in FLAGS)]
    strange = [name for name in environ if name.startswith(_VARIABLES) and name not in known]
    return [_unknown(name, known) for name in sorted(strange) if not _SERVICE_LINK.search(name)]


def _unknown(name: str, known: Sequence[str]) -> str:
    # The common prefix would make any two names look alike.
    close = difflib.get_close_matches(
        name.removeprefix(_VARIABLES), [other.removeprefix(_VARIABLES) for other in known], 1
    )
    hint = f"did you mean {_VARIABLES}{close[0]}?" if close else "see `gateway serve --help` for the names"
    return f"{name} is set, but the gateway has no such variable; {hint}"


def _parsed(flag: Flag, given: Given) -> Any:
    parsed = []
    for text in given.texts:
        try:
            parsed.append(flag.parse(text))
        except ValueError as error:
            shown = "this value" if flag.key in _SECRET_KEYS and "@" in text else repr(text)
            raise ConfigError(f"{given.where}: {shown} is not allowed; {error}") from None
    return tuple(dict.fromkeys(parsed)) if flag.repeatable else parsed[-1]


def _file_values(path: str, read_text: Callable[[str], str]) -> dict[str, Given]:
    try:
        data = tomllib.loads(_read(path, "--config", read_text))
    except (ValueError, RecursionError) as error:  # also Python's own ValueError for an integer with too many digits
        raise ConfigError(f"--config: {path}: {error}") from None
    return {key.replace("-", "_"): _file_value(key, value, path) for key, value in data.items()}


def _file_value(key: str, value: Any, path: str) -> Given:
    flag = BY_KEY.get(key.replace("-", "_"))
    if flag is None:
        close = difflib.get_close_matches(key.replace("_", "-"), [flag.name for flag in FLAGS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; see `gateway serve --help` for the names"
        raise ConfigError(f"{path}: unknown key {key!r}{hint}")
    items = value if isinstance(value, list) else [value]
    if flag.key == "source_ips":
        items = [",".join(map(str, items))]
    elif isinstance(value, list) and not flag.repeatable:
        raise ConfigError(f"{path}: {key} takes one value, not a list")
    return Given(tuple(_file_text(item, key, path) for item in items), f"{path}: {key}")


def _file_text(value: Any, key: str, path: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 64:
        raise ConfigError(f"{path}: {key}: the number is too large")
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{path}: {key} must be text, a number, or true or false")


def _read(path: str, where: str, read_text: Callable[[str], str]) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{where}: {path!r} cannot be read: {reason}") from None


def _settings(values: dict[str, Any], around: Surroundings) -> Settings:
    files = {key: values.pop(key) for key in _FILES if key in values}
    fields = {_FIELDS.get(key, key): value for key, value in values.items()}
    if fields.get("log_format", "auto") == "auto":
        fields["log_format"] = "text" if around.stderr_is_terminal else "json"
    fields.setdefault("workers", around.cpus)
    if path := files.get("upstream_api_key_file"):
        fields["upstream_api_key"] = _secret(path, "--upstream-api-key-file", around.read_text)
    if path := files.get("training_api_key_file"):
        fields["training_api_key"] = _secret(path, "--training-api-key-file", around.read_text)
    if path := files.get("admin_key_file"):
        fields["admin_key"] = _secret(path, "--admin-key-file", around.read_text)
    if path := files.get("api_keys_file"):
        fields["api_keys"] = parse_keys(_read(path, "--api-keys-file", around.read_text), path)
    return Settings(**fields)


def _secret(path: str, where: str, read_text: Callable[[str], str]) -> str:
    secret = _read(path, where, read_text).strip()
    # The key is sent in a header, which holds one line of visible characters.
    if not secret or not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"{where}: {path!r} must hold one line of printable ASCII, the key")
    return secret


def check_together(settings: Settings, tls_given: tuple[bool, bool] = (False, False)) -> None:
    """Refuse values that exclude each other. Raises `ConfigError`."""
    if not settings.upstreams:
        raise ConfigError("--upstream is missing; give the base URL of a vLLM server, such as http://10.0.0.5:8000")
    if tls_given[0] != tls_given[1]:
        raise ConfigError("--tls-cert and --tls-key belong together; give both or none")
    _check_access(settings)
    _check_training(settings)
    _check_templates(settings)
    if settings.port == settings.admin_port and settings.port and settings.host == settings.admin_host:
        raise ConfigError(f"--admin-port: {settings.admin_port} is --port as well; choose two different ports")
    names = [model.name for model in settings.models]
    if len(set(names)) < len(names):
        raise ConfigError("--model: a name is given twice with different upstream names; give each name once")


def _check_access(settings: Settings) -> None:
    if settings.api_keys is None and not settings.allow_anonymous and not is_loopback(settings.host):
        raise ConfigError(
            f"--host: {settings.host!r} is not a loopback address and there are no API keys;"
            " give --api-keys-file, or --allow-anonymous to let anybody in"
        )
    if settings.admin_key is None and not is_loopback(settings.admin_host):
        raise ConfigError(
            f"--admin-host: {settings.admin_host!r} is not a loopback address; that needs --admin-key-file"
        )


def _check_training(settings: Settings) -> None:
    has_key, forwards = settings.training_api_key is not None, settings.training_forward_key
    if has_key and forwards:
        raise ConfigError("--training-forward-key: --training-api-key-file is given as well; choose one of the two")
    if settings.training_upstream is None and (has_key or forwards):
        flag = "--training-api-key-file" if has_key else "--training-forward-key"
        raise ConfigError(f"{flag} has no meaning without --training-upstream; give both or none")


def _check_templates(settings: Settings) -> None:
    try:
        check_templates(settings.lora_name_template, settings.lora_path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def for_running_gateway(new: Settings, running: Settings) -> Settings:
    """Return `new` with the values kept that are fixed at start; new workers get the rest."""
    return msgspec.structs.replace(new, **{name: getattr(running, name) for name in FIXED_AT_START})


def need_a_restart(new: Settings, running: Settings) -> list[str]:
    """Return the flags that changed and that only a restart applies."""
    return [f"--{flag}" for name, flag in FIXED_AT_START.items() if getattr(new, name) != getattr(running, name)]


def roll_deadline_s(settings: Settings) -> float:
    """Return how long a replaced worker may drain: longer than any sample can run, since a roll waits for them all."""
    return settings.upstream_wait_s + settings.longest_attempt_s * (1 + settings.max_reexecutions)
