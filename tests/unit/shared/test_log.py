from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from shared.log import JsonFormatter, TextFormatter, configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def record() -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "gateway.x", "levelname": "WARNING", "msg": "a worker died", "slot": 1})
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def test_json_has_the_fields_beside_a_static_message(record: logging.LogRecord) -> None:
    line = json.loads(JsonFormatter({"slot_name": "a"}).format(record))
    assert line["message"] == "a worker died"
    assert (line["level"], line["logger"], line["slot"], line["slot_name"]) == ("warning", "gateway.x", 1, "a")
    assert line["time"].endswith(".250Z")


def test_json_takes_any_value_and_tracebacks(record: logging.LogRecord) -> None:
    record.odd = {1, 2}
    try:
        raise ValueError("boom")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(JsonFormatter({}).format(record))
    assert line["odd"] == "{1, 2}"
    assert "ValueError: boom" in line["exception"]


def test_a_line_stays_one_line_whatever_another_server_says(record: logging.LogRecord) -> None:
    text = "<html>\r\n<h1>502</h1>\x1b[2J\u2028\x00 \ud800 höflich"
    vars(record)["error"] = text
    line = TextFormatter({}).format(record)
    assert line.isprintable() and line.endswith("<h1>502</h1>\\x1b[2J\\u2028\\x00 \\ud800 höflich")
    assert json.loads(JsonFormatter({}).format(record))["error"] == text


def test_json_takes_numbers_of_any_size(record: logging.LogRecord) -> None:
    vars(record)["size"] = 10**30
    assert json.loads(JsonFormatter({}).format(record))["size"] == 10**30


def test_text_is_for_people(record: logging.LogRecord) -> None:
    assert TextFormatter({}).format(record).endswith("WARNING gateway.x a worker died  slot=1")
    delattr(record, "slot")
    assert TextFormatter({}).format(record).endswith("a worker died")


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(("format_", "parse"), [("json", json.loads), ("text", str)])
def test_configured(format_: str, parse: Any) -> None:
    stream = io.StringIO()
    configure_logging(format_, "info", stream, slot=7)
    logging.getLogger("x").debug("hidden")
    logging.getLogger("x").info("shown")
    logging.getLogger("uvicorn").info("hidden")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "shown" in str(parse(lines[0]))
    assert "7" in lines[0]


@pytest.mark.usefixtures("restored_logging")
def test_the_access_log_speaks_though_its_library_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """--access-log: uvicorn's own words are for trouble only, its line per request is asked for."""
    stream = io.StringIO()
    # A server without an access log, made by another test of this process, has cut it off.
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    configure_logging("json", "info", stream)
    logging.getLogger("uvicorn.error").info("chatter")
    logging.getLogger("uvicorn.access").info("a request")
    assert "chatter" not in stream.getvalue()
    assert "a request" in stream.getvalue()


@pytest.mark.usefixtures("restored_logging")
def test_the_access_log_leaves_queries_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes a query; what stands in one may be a key."""
    stream = io.StringIO()
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    configure_logging("json", "info", stream)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "h:1", "GET", "/a?key=tml-x", "1.1", 200)
    assert '"GET /a HTTP/1.1\\" 200' in stream.getvalue()
    assert "tml-x" not in stream.getvalue()
