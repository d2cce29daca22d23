"""The type of a command line option that a parser reads; see `quantities.py` for the parsers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable


class Parsed(click.ParamType[Any]):
    """An option whose text `parse` reads. `metavar` stands for the text in the help.

    `parse` raises `ValueError` with what is allowed, so an error reads the same as one of `gateway serve`.
    """

    def __init__(self, parse: Callable[[str], Any], metavar: str) -> None:
        self.name = metavar
        self._parse = parse

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r} is not allowed; {error}", param, ctx)
