"""The command line. The module of a command is imported when the command runs, so that `gateway --help` is fast."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from gateway.settings.command_line import SettingsCommand, settings_from, settings_options
from gateway.settings.resolve import unknown_variables
from shared.core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Sequence


EXIT_OK: Final = 0
EXIT_CHECK_FAILED: Final = 1
# The reader of the output went away before its end.
EXIT_UNREAD: Final = 1
EXIT_CONFIG: Final = 2
EXIT_START: Final = 3
EXIT_WORKERS_DIE: Final = 4

# name -> (module, help for the list of commands). The function has the name of its command.
_COMMANDS: Final = {
    "serve": ("gateway.cli", "Run the gateway (the same as no command)."),
    "check": ("gateway.commands.check", "Test everything that serve needs, and print a table."),
    "status": ("gateway.commands.status", "Show the workers, Redis, upstreams and samples of a running gateway."),
    "upstreams": ("gateway.commands.upstreams", "Show and change the upstreams of a running gateway."),
    "keys": ("gateway.commands.keys", "Add, list and revoke API keys (--api-keys-file)."),
    "new-key": ("gateway.commands.keys", "Make an API key and print its entry, without a file."),
    "demo": ("gateway.bench.demo", "See it work: simulated vLLM, gateway, samples, report. No GPU, no Redis."),
    "bench": ("gateway.bench.command", "Put load on a gateway, check every result, and print a report."),
    "simulate-vllm": ("gateway.simulator.command", "Run a simulated vLLM server."),
}


class LazyGroup(click.Group):
    """A group whose default command is `serve`: `gateway --upstream ...` is `gateway serve --upstream ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help", "--version")):
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tinker-sampling-gateway", prog_name="gateway")
def gateway() -> None:
    """Run a sampling gateway for the Tinker API: worker processes in front of vLLM, with results kept in Redis.

    \b
    Try it, without GPU or Redis:  gateway demo
    Run it in front of vLLM:       gateway --upstream http://127.0.0.1:8100
    Check before you start it:     gateway check --upstream http://127.0.0.1:8100
    See what it is doing:          gateway status

    Clients set TINKER_BASE_URL to the address of the gateway and TINKER_API_KEY to any key that starts with tml-. Every
    command has its own --help.
    """


@click.command(cls=SettingsCommand)
@settings_options
def serve(**values: Any) -> int:
    """Run the gateway until SIGTERM.

    Every flag can also be an environment variable (GATEWAY_ and its name in capitals, such as GATEWAY_MAX_IN_FLIGHT)
    or a key in the --config file (max-in-flight = 1000). A flag wins over the environment, which wins over the file.

    \b
    Signals:     SIGTERM, SIGINT  drain and stop; a second one stops at once
                 SIGHUP           read keys and limits again, and replace the workers
                 SIGUSR1          log the status
    Exit codes:  0 stopped by a signal   2 invalid configuration
                 3 could not start       4 workers keep dying at start
    """
    settings = settings_from(dict(values))
    from gateway import serve as server  # late: --help needs none of it

    doubts = unknown_variables(os.environ)
    return server.run(settings, reread=lambda: settings_from(dict(values)), doubts=doubts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit. Every error becomes one line on standard error and an exit code."""
    _open_missing_streams()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        code = EXIT_UNREAD
    try:
        sys.stdout.flush()
    except OSError:
        # Python would complain at its end about what nobody reads any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that was closed before the start.

    Otherwise Python has no object for it, and the next socket gets its number, which the workers would then write to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _run(arguments: list[str]) -> int:
    try:
        result: object = gateway.main(arguments, prog_name="gateway", standalone_mode=False)
    except click.ClickException as error:
        return _complain(_explain(error), error.exit_code)
    except ConfigError as error:
        return _complain(str(error), EXIT_CONFIG)
    except StartError as error:
        return _complain(str(error), EXIT_START)
    except (click.Abort, KeyboardInterrupt):
        return 130
    return result if isinstance(result, int) else EXIT_OK


def _explain(error: click.ClickException) -> str:
    """Write an error of the command line as the gateway writes its own: what is wrong; what is allowed."""
    said = error.message.rstrip(".")
    match error:
        case click.exceptions.NoArgsIsHelpError(ctx=ctx):
            return f"`{ctx.command_path}` needs a command; {_commands(ctx)}"
        case click.exceptions.NoSuchCommand(command_name=name, ctx=click.Context() as ctx):
            return f"`{ctx.command_path}` has no command {name!r}; {_commands(ctx)}"
        case click.NoSuchOption(option_name=name, possibilities=close, ctx=click.Context() as ctx):
            hint = f"did you mean {' or '.join(close)}?" if close else f"see `{ctx.command_path} --help`"
            return f"`{ctx.command_path}` has no option {name}; {hint}"
        case click.MissingParameter(param=click.Parameter() as param, ctx=click.Context() as ctx):
            way = f"give it or set {param.envvar}" if param.envvar else f"see `{ctx.command_path} --help`"
            return f"{_name(param)} is missing; {way}"
        case click.BadParameter(param=click.Parameter() as param):
            return f"{_name(param)}: {said}"
        case click.BadParameter(param_hint=str(name)):
            return f"{name}: {said}"
    return said[:1].lower() + said[1:]


def _commands(ctx: click.Context) -> str:
    assert isinstance(ctx.command, click.Group)
    return f"the commands are {', '.join(ctx.command.list_commands(ctx))}"


def _name(param: click.Parameter) -> str:
    """Return what the help calls a parameter: the longest spelling of an option, or NAME for an argument."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.metavar or str(param.name).upper()


def _complain(message: str, code: int) -> int:
    click.echo(f"gateway: {' '.join(message.split())}", err=True)
    return code
