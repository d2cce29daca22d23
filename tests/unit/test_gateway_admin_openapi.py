"""The OpenAPI document says what is served, in a form that tools read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.admin.openapi import API, OPERATIONS, document
from workers import app
from workers.responses import STATUS_OF_ANSWER, STATUS_OF_ERROR, UNEXPECTED

DOCUMENT = document("1.2.3")
ALL = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


def test_it_names_every_public_route_and_none_else() -> None:
    served = {(method, path) for method, path, _ in (*app.HOT, *app.ROUTED)} | {("GET", "/healthz")}
    assert set(OPERATIONS) == served, "a new route is described in gateway/admin/openapi.py"
    assert API == app.API


def test_it_is_json_of_the_version() -> None:
    assert json.loads(json.dumps(DOCUMENT))["info"]["version"] == "1.2.3"


@pytest.mark.parametrize(("path", "method"), ALL)
def test_every_operation_is_whole(path: str, method: str) -> None:
    operation: dict[str, Any] = DOCUMENT["paths"][path][method]
    assert operation["summary"]
    assert [parameter["name"] for parameter in operation.get("parameters", [])] == re.findall(r"{(\w+)}", path)
    assert ("requestBody" in operation) == (method == "post")


def test_every_status_is_told() -> None:
    """501 is of the paths that are not served here, 502 and 503 are of those that are passed on."""
    statuses = {*STATUS_OF_ANSWER.values(), *(status for _, status in STATUS_OF_ERROR), UNEXPECTED} - {501, 502, 503}
    assert set(DOCUMENT["paths"][API + "/asample"]["post"]["responses"]) == {str(status) for status in statuses}


@pytest.mark.parametrize(("path", "method"), ALL)
def test_required_fields_have_a_schema(path: str, method: str) -> None:
    body = DOCUMENT["paths"][path][method].get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        assert set(schema["required"]) <= set(schema["properties"])
