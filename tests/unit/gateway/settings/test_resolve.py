from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.settings.resolve import Surroundings, resolve, unknown_variables
from gateway.settings.table import FLAGS
from shared.config import MIB, ModelName, Settings
from shared.core.errors import ConfigError

UPSTREAM = ("http://u",)


def settings(environ: dict[str, str] | None = None, files: dict[str, str] | None = None, **flags: Any) -> Settings:
    def read_text(path: str) -> str:
        try:
            return (files or {})[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory") from None

    config = flags.pop("config", None)
    given = {key: (value,) if isinstance(value, str) else value for key, value in flags.items()}
    around = Surroundings(environ or {}, read_text, cpus=3, stderr_is_terminal=False)
    return resolve(given, around, config)


def test_defaults_are_those_of_settings() -> None:
    expected = msgspec.structs.replace(Settings(), upstreams=UPSTREAM, workers=3)
    assert settings(upstream=UPSTREAM) == expected


def test_flag_before_environment_before_file() -> None:
    files = {"g.toml": 'upstream = ["http://file"]\nport = 1\nworkers = 1\nlease = 9'}
    found = settings({"GATEWAY_PORT": "2", "GATEWAY_WORKERS": "2"}, files, config="g.toml", workers="4")
    assert (found.workers, found.port, found.lease_s, found.upstreams) == (4, 2, 9.0, ("http://file",))


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
def test_a_number_without_end_is_refused_in_words(number: str) -> None:
    with pytest.raises(ConfigError, match=r"g\.toml"):
        settings({}, {"g.toml": f"port = {number}"}, config="g.toml")


def test_a_file_that_is_nested_without_end_is_refused_in_words() -> None:
    """Found by the fuzzer: the library's parser has no bound of its own."""
    with pytest.raises(ConfigError, match=r"--config: g\.toml: "):
        settings({}, {"g.toml": "port = " + "[" * 5000}, config="g.toml")


def test_the_file_may_come_from_the_environment() -> None:
    assert settings({"GATEWAY_CONFIG": "g"}, {"g": 'upstream = "http://x"'}).upstreams == ("http://x",)


def test_an_empty_variable_is_not_set() -> None:
    assert settings({"GATEWAY_PORT": ""}, upstream=UPSTREAM).port == 8000


def test_a_mistyped_variable_is_reported_with_the_name_that_was_meant() -> None:
    environ = {"GATEWAY_PORT": "1", "GATEWAY_CONFIG": "g", "GATEWAY_UPSTREAMS": "x", "GATEWAY_ZZZ": "", "PATH": "p"}
    upstreams, strange = unknown_variables(environ)
    assert upstreams == "GATEWAY_UPSTREAMS is set, but the gateway has no such variable; did you mean GATEWAY_UPSTREAM?"
    assert "GATEWAY_ZZZ is set" in strange and "--help" in strange


def test_what_kubernetes_tells_of_a_service_called_gateway_is_no_typing_error() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    assert unknown_variables({f"GATEWAY_{name}": "10.0.0.1" for name in names}) == []


def test_repeatable_values() -> None:
    found = settings({"GATEWAY_UPSTREAM": "http://a, http://b/ http://a"}, model=("m", "n=/data/n"))
    assert found.upstreams == ("http://a", "http://b")
    assert found.models == (ModelName("m", "m"), ModelName("n", "/data/n"))


def test_file_values_of_every_kind() -> None:
    text = """
        upstream = ["http://a"]
        source-ips = ["10.0.0.1", "10.0.0.3-10.0.0.4"]
        retry_ambiguous = true
        max-body-bytes = "2MiB"
        poll-timeout = 2.5
        max-connections = "auto"
        session-poll = "off"
    """
    found = settings({}, {"g": text}, config="g")
    assert found.source_ips == ("10.0.0.1", "10.0.0.3", "10.0.0.4")
    assert found.retry_ambiguous
    assert not found.session_poll
    assert (found.max_body_bytes, found.poll_timeout_s, found.max_connections) == (2 * MIB, 2.5, None)


def test_secrets_come_from_files() -> None:
    files = {"u": "up-key\n", "a": "admin-key\n", "k": f'[[keys]]\nname = "x"\nsha256 = "{"ab" * 32}"'}
    found = settings(
        {}, files, upstream=UPSTREAM, upstream_api_key_file="u", admin_key_file="a", api_keys_file="k", host="0.0.0.0"
    )
    assert found.api_keys is not None
    assert (found.upstream_api_key, found.admin_key, found.api_keys[0].name) == ("up-key", "admin-key", "x")


def test_the_log_format_follows_the_terminal() -> None:
    around = Surroundings({}, lambda path: "", cpus=1, stderr_is_terminal=True)
    assert resolve({"upstream": UPSTREAM}, around).log_format == "text"
    assert resolve({"upstream": UPSTREAM, "log_format": ("json",)}, around).log_format == "json"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"retrieved_ttl": "0"}, "--retrieved-ttl: '0' is not allowed; give seconds from"),
    ({"port": "70000"}, "--port: '70000' is not allowed; give a whole number from 0 to 65535"),
    ({"environ": {"GATEWAY_PORT": "x"}}, "GATEWAY_PORT (--port): 'x' is not allowed; give"),
    ({"upstream": ()}, "--upstream is missing"),
    ({"upstream": ("ftp://x",)}, "--upstream: 'ftp://x' is not allowed; give the base URL"),
    ({"upstream": ("http://me:hunter2@x",)}, "--upstream: this value is not allowed; credentials"),
    ({"redis_url": "http://:hunter2@x"}, "--redis-url: this value is not allowed; allowed are redis://"),
    ({"redis_url": "redis+cluster://x/1"}, "--redis-url: 'redis+cluster://x/1' is not allowed; allowed are redis://"),
    (
        {"training_upstream": "x"},
        "--training-upstream: 'x' is not allowed; give the base URL of a Tinker training server",
    ),
    ({"training_upstream": "http://me:hunter2@x"}, "--training-upstream: this value is not allowed; credentials"),
    ({"training_upstream": "http://x/api/v1"}, "give the base URL without /api/v1"),
    ({"training_forward_key": "true"}, "--training-forward-key has no meaning without --training-upstream"),
    ({"training_api_key_file": "key"}, "--training-api-key-file has no meaning without --training-upstream"),
    (
        {"training_upstream": "http://x", "training_api_key_file": "key", "training_forward_key": "true"},
        "--training-forward-key: --training-api-key-file is given as well",
    ),
    ({"lora_path": "/x"}, "--lora-path: '/x' is not allowed; with --lora-path both {run_id} and {checkpoint}"),
    ({"host": "0.0.0.0"}, "--host: '0.0.0.0' is not a loopback address and there are no API keys"),
    ({"admin_host": "::"}, "--admin-host: '::' is not a loopback address; that needs --admin-key-file"),
    ({"tls_cert": "x"}, "--tls-cert and --tls-key belong together"),
    ({"tls_key": "x"}, "--tls-cert and --tls-key belong together"),
    ({"admin_port": "8000"}, "--admin-port: 8000 is --port as well"),
    ({"lora_name": "x"}, "--lora-name: 'x' is not allowed; the field {run_id} is needed"),
    ({"lora_name": "{run_id}{0}"}, "--lora-name: '{run_id}{0}' is not a template"),
    ({"lora_name": "{run_id"}, "--lora-name: '{run_id' is not a template"),
    ({"model": ("a=b", "a=c")}, "--model: a name is given twice"),
    ({"max_connections": "many"}, "--max-connections: 'many' is not allowed; give auto, 0 (no limit)"),
    ({"session_poll": "on"}, "--session-poll: 'on' is not allowed; allowed are auto, off"),
    ({"key_prefix": "a{b}"}, "--key-prefix: 'a{b}' is not allowed; use letters"),
    ({"source_ips": "10.0.0.300"}, "--source-ips: '10.0.0.300' is not allowed; '10.0.0.300' is not an IP address"),
    ({"api_keys_file": "none"}, "--api-keys-file: 'none' cannot be read: No such file"),
    ({"admin_key_file": "two"}, "--admin-key-file: 'two' must hold one line of printable ASCII"),
    ({"config": "none"}, "--config: 'none' cannot be read: No such file"),
    ({"config": "broken"}, "--config: broken: "),
    ({"config": "typo"}, "typo: unknown key 'max-inflight'; did you mean 'max-in-flight'?"),
    ({"config": "odd"}, "odd: unknown key 'zzz'; see `gateway serve --help`"),
    ({"config": "list"}, "list: port takes one value, not a list"),
    ({"config": "table"}, "table: port must be text, a number, or true or false"),
    ({"config": "value"}, "value: port: 'x' is not allowed; give a whole number"),
]
FILES = {
    "key": "tml-operator",
    "two": "a\nb",
    "broken": "port = ",
    "typo": "max-inflight = 3",
    "odd": "zzz = 3",
    "list": "port = [1, 2]",
    "table": "[port]\nx = 1",
    "value": 'port = "x"',
}


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_value_is_one_line_that_says_what_is_allowed(given: dict[str, Any], message: str) -> None:
    """B10"""
    given = {"upstream": UPSTREAM, **given}
    with pytest.raises(ConfigError) as refusal:
        settings(given.pop("environ", {}), FILES, **given)
    text = str(refusal.value)
    assert message in text
    assert "\n" not in text
    assert "hunter2" not in text


def test_every_field_of_settings_can_be_given_and_every_flag_has_a_field() -> None:
    from gateway.settings.resolve import _FIELDS, _FILES

    contents = {
        "upstream_api_key_file": "upstream_api_key",
        "training_api_key_file": "training_api_key",
        "api_keys_file": "api_keys",
        "admin_key_file": "admin_key",
    }
    assert set(contents) == set(_FILES)
    reached = {contents.get(flag.key) or _FIELDS.get(flag.key, flag.key) for flag in FLAGS}
    assert reached == set(Settings.__struct_fields__)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_help_teaches(flag: Any) -> None:
    assert len(flag.help) > 25
    assert flag.help.endswith(".")
    assert flag.is_switch or flag.metavar
