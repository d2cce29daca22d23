"""Click options made from the table of flags, and the settings made from the values that click collects."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.settings.resolve import CONFIG_VARIABLE, Surroundings, resolve
from gateway.settings.table import FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.settings.flag import Flag
    from shared.config import Settings


class SettingsCommand(click.Command):
    """A command with all flags of `gateway serve`; its help lists them in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        titles = {flag.key: flag.section for flag in FLAGS}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                sections.setdefault(titles.get(parameter.name or "", "General"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config` and all flags; the function gets them as keyword arguments, to pass on to `settings_from`."""
    for flag in reversed(FLAGS):
        function = _option(flag)(function)
    config = click.option(
        "--config",
        metavar="PATH",
        help=f"TOML file with flags as keys, such as max-in-flight = 1000 [{CONFIG_VARIABLE}].",
    )
    return config(function)


def _option(flag: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    help_ = f"{flag.help} [default: {flag.default}]" if flag.default != "required" else f"{flag.help} [required]"
    if flag.is_switch:
        return click.option(f"--{flag.name}/--no-{flag.name}", flag.key, default=None, help=help_)
    return click.option(f"--{flag.name}", flag.key, multiple=flag.repeatable, metavar=flag.metavar, help=help_)


def settings_from(values: dict[str, Any], note_key_file: Callable[[str], object] | None = None) -> Settings:
    """Return the settings for the values that click collected. Raises `ConfigError`.

    `note_key_file` is called with the path of each file of keys that is read.
    """
    config = values.pop("config", None)
    given = {key: _texts(value) for key, value in values.items() if value is not None and value != ()}

    def read_text(path: str) -> str:
        text = Path(path).read_text(encoding="utf-8")
        if note_key_file is not None and path not in (config, os.environ.get(CONFIG_VARIABLE)):
            note_key_file(path)
        return text

    around = Surroundings(
        environ=os.environ,
        read_text=read_text,
        cpus=len(os.sched_getaffinity(0)),
        stderr_is_terminal=sys.stderr.isatty(),
    )
    return resolve(given, around, config)


def _texts(value: bool | str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return (str(value).lower() if isinstance(value, bool) else value,)
