"""Logging with the standard library: one line per event, as text for people or as JSON for machines.

A record is a static message with separate fields (`extra={...}`), so that lines can be counted and searched. Prompts,
tokens and keys are never fields. A `Throttle` limits how often a line that may repeat is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final, TextIO

import orjson


class Throttle:
    """Allow at most one line per subject in `every_s`. The subjects are a bounded set."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._logged: dict[str, tuple[float, int]] = {}

    def allow(self, subject: str, now_s: float) -> int | None:
        """Return how many lines were suppressed since the last one, or None if this one must be suppressed as well."""
        logged_s, suppressed = self._logged.get(subject, (float("-inf"), 0))
        if now_s - logged_s < self._every_s:
            self._logged[subject] = (logged_s, suppressed + 1)
            return None
        self._logged[subject] = (now_s, 0)
        return suppressed


# The attributes of every LogRecord; any other came in through `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Write one JSON object per line: time (RFC 3339, UTC), level, logger, message and fields."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, fixed: dict[str, Any]) -> None:
        super().__init__()
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fixed,
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except TypeError:
            # Half a surrogate pair or a number of any size, from a client or an upstream: a line must not be lost.
            return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Write lines like `12:00:01 WARNING gateway.fleet a worker died  slot=1 code=-9`.

    What would break the line, or move a terminal's cursor, is written as an escape: a field may hold what another
    server sent.
    """

    def __init__(self, fixed: dict[str, Any]) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s", "%H:%M:%S")
        self._fixed = fixed

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {**self._fixed, **fields_of(record)}
        pairs = " ".join(f"{name}={value}" for name, value in fields.items())
        return _one_line(super().formatMessage(record) + (f"  {pairs}" if pairs else ""))


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def without_query(record: logging.LogRecord) -> bool:
    """Cut queries from access lines: no path takes one, so its text is a client's mistake, perhaps a key."""
    if isinstance(record.args, tuple):
        record.args = tuple(value.partition("?")[0] if isinstance(value, str) else value for value in record.args)
    return True


def configure_logging(format_: str, level: str, stream: TextIO | None = None, **fixed: Any) -> None:
    """Write all logs to `stream` (standard error), as `text` or `json`, with the `fixed` fields on every line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JsonFormatter(fixed) if format_ == "json" else TextFormatter(fixed)
    # Wall time in UTC, so that lines of several hosts can be merged.
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries log only problems.
    for library in ("uvicorn", "asyncio", "aiohttp"):
        logging.getLogger(library).setLevel(logging.WARNING)
    # These lines were asked for with --access-log.
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    access.addFilter(without_query)
