"""Click options made of the table of flags, and the settings of what click collected."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
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
    """A command that takes all of serve's flags, listed in sections."""

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
    """Add `--config` and every row of the table; the function gets them as keyword arguments for `settings_from`."""
    for flag in reversed(FLAGS):
        function = _option(flag)(function)
    config = click.option(
        "--config", metavar="PATH", help=f"TOML file with any of these flags as keys [{CONFIG_VARIABLE}]."
    )
    return config(function)


def _option(flag: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    help_ = f"{flag.help} [default: {flag.default}]" if flag.default != "required" else f"{flag.help} [required]"
    if flag.is_switch:
        return click.option(f"--{flag.name}/--no-{flag.name}", flag.key, default=None, help=help_)
    return click.option(f"--{flag.name}", flag.key, multiple=flag.repeatable, metavar=flag.metavar, help=help_)


def settings_from(values: dict[str, Any], note_key_file: Callable[[str], object] | None = None) -> Settings:
    """The settings for what click collected; `note_key_file` hears which files of keys were read.

    Raises `ConfigError`.
    """
    config = values.pop("config", None)
    given = {key: _texts(value) for key, value in values.items() if value is not None and value != ()}
    around = surroundings()
    if note_key_file is not None:
        around = replace(around, read_text=_noting(around.read_text, note_key_file, config))
    return resolve(given, around, config)


def _noting(read: Callable[[str], str], note: Callable[[str], object], config: str | None) -> Callable[[str], str]:
    def read_text(path: str) -> str:
        text = read(path)
        if path not in (config, os.environ.get(CONFIG_VARIABLE)):
            note(path)
        return text

    return read_text


def _texts(value: bool | str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return (str(value).lower() if isinstance(value, bool) else value,)


def surroundings() -> Surroundings:
    return Surroundings(
        environ=os.environ,
        read_text=lambda path: Path(path).read_text(encoding="utf-8"),
        cpus=len(os.sched_getaffinity(0)),
        stderr_is_terminal=sys.stderr.isatty(),
    )
