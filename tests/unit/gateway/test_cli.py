from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import pytest

from gateway import cli, serve
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.config import Settings

UPSTREAM = ["--upstream", "http://u"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What would have been served."""
    seen: list[Settings] = []

    def run(settings: Settings, reread: Callable[[], Settings], doubts: Sequence[str]) -> int:
        assert reread() == settings
        seen.append(settings)
        return cli.EXIT_OK

    monkeypatch.setattr(serve, "run", run)
    return seen


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_no_command_is_serve(started: list[Settings]) -> None:
    assert exit_code(*UPSTREAM) == 0
    assert exit_code("serve", *UPSTREAM) == 0
    assert started[0] == started[1]


def test_flags_of_every_kind(started: list[Settings]) -> None:
    flags = ["--retry-ambiguous", "--no-access-log", "--model", "a", "--model", "b=c", "--workers", "2"]
    assert exit_code(*UPSTREAM, "--upstream", "http://v", *flags) == 0
    settings = started[0]
    assert (settings.retry_ambiguous, settings.access_log, settings.workers) == (True, False, 2)
    assert settings.upstreams == ("http://u", "http://v")
    assert [model.upstream_name for model in settings.models] == ["a", "c"]


def test_a_switch_can_be_turned_off_against_the_environment(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_RETRY_AMBIGUOUS", "true")
    exit_code(*UPSTREAM)
    exit_code(*UPSTREAM, "--no-retry-ambiguous")
    assert [settings.retry_ambiguous for settings in started] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "gateway: --upstream is missing"),
        (["--no-such"], "gateway: `gateway serve` has no option --no-such; see `gateway serve --help`"),
        (["--worker", "2"], "gateway: `gateway serve` has no option --worker; did you mean --workers?"),
        (["--port"], "gateway: option '--port' requires an argument"),
        (["serve", "more"], "gateway: got unexpected extra argument (more)"),
        (["fly"], "gateway: `gateway` has no command 'fly'; the commands are serve, check, "),
        (["keys"], "gateway: `gateway keys` needs a command; the commands are add, list, revoke"),
        (["keys", "fly"], "gateway: `gateway keys` has no command 'fly'; the commands are add, list, revoke"),
        (["upstreams"], "gateway: `gateway upstreams` needs a command; the commands are list, reset, set"),
        ([*UPSTREAM, "--port", "x"], "gateway: --port: 'x' is not allowed; give a whole number from 0 to 65535"),
        (["check"], "gateway: --upstream is missing"),
        (["keys", "list"], "gateway: --api-keys-file is missing; give it or set GATEWAY_API_KEYS_FILE"),
        (["keys", "add"], "gateway: NAME is missing; see `gateway keys add --help`"),
        (["upstreams", "set"], "gateway: URL... is missing; see `gateway upstreams set --help`"),
        (["new-key", '"'], "gateway: NAME: use printable text"),
        (["demo", "--samples", "0"], "gateway: --samples: '0' is not allowed; give a whole number of at least 1"),
        (["demo", "--workers", "x"], "gateway: --workers: 'x' is not allowed; give a whole number from 1 to 64"),
        (["bench", "--preset", "x"], "gateway: --preset: 'x' is not allowed; allowed are burst, "),
        (["bench", "--cancel", "nan"], "gateway: --cancel: 'nan' is not allowed; give a number from 0 to 1"),
        (["bench", "--heartbeat-seconds", "0"], "gateway: --heartbeat-seconds: '0' is not allowed; give seconds from"),
        (["bench", "--chaos", "x"], "gateway: --chaos: 'x' is not allowed; give random, or WHAT@SECONDS"),
        (["bench", "--json", "/"], "gateway: --json: File '/' is a directory"),
        (["simulate-vllm", "--mode", "x"], "gateway: --mode: 'x' is not allowed; allowed are instant, "),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, started: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    """B10"""
    assert exit_code(*arguments) == cli.EXIT_CONFIG
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1
    assert not errors.endswith(".\n")
    assert not started


def test_a_start_that_fails_is_one_line_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: Settings, reread: object, doubts: object) -> int:
        raise StartError("the port is taken")

    monkeypatch.setattr(serve, "run", run)
    assert exit_code(*UPSTREAM) == cli.EXIT_START
    assert capsys.readouterr().err == "gateway: the port is taken\n"


def test_the_exit_code_of_the_supervisor_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "run", lambda settings, reread, doubts: cli.EXIT_WORKERS_DIE)
    assert exit_code(*UPSTREAM) == cli.EXIT_WORKERS_DIE


@pytest.mark.parametrize("command", ["serve", "check", "status", "keys", "new-key"])
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    long = capsys.readouterr().out
    assert "--help" in long
    assert exit_code(command, "-h") == 0
    assert capsys.readouterr().out == long


def test_the_list_of_commands_imports_none_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, _ in cli._COMMANDS.values():
        if module != "gateway.cli":
            monkeypatch.setitem(sys.modules, module, None)  # importing it would raise
    assert exit_code("--help") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in cli._COMMANDS)


def test_every_flag_is_listed_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    from gateway.settings.table import FLAGS

    exit_code("serve", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for flag in FLAGS:
        assert f"--{flag.name}" in text
    assert text.count("[default: ") == len(FLAGS) - 1


def test_an_interrupt_before_the_start_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Settings, reread: object, doubts: object) -> int:
        raise click.Abort

    monkeypatch.setattr(serve, "run", run)
    assert exit_code(*UPSTREAM) == 130
