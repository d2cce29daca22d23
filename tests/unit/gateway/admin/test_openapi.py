"""The OpenAPI document says what is served, in a form that tools can read."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from gateway.admin.openapi import API, OPENAI, OPERATIONS, document
from shared.wire.sdk import calls
from workers.api import app
from workers.api.replies import STATUS_OF_ANSWER, STATUS_OF_ERROR, UNEXPECTED

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = document("1.2.3")
ALL = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


def test_it_names_every_public_route_and_none_else() -> None:
    served = {(method, path) for method, path, _ in (*app.HOT, *app.ROUTED)} | {("GET", "/healthz")}
    assert set(OPERATIONS) == served, "a new route is described in gateway/admin/openapi.py"
    assert API == app.API
    assert set(OPENAI) == {(method, path) for method, path, _ in app.OPENAI}
    assert set(DOCUMENT["paths"]) == {API + path for _, path in OPERATIONS} | {path for _, path in OPENAI}


def test_it_is_json_of_the_version() -> None:
    assert json.loads(json.dumps(DOCUMENT))["info"]["version"] == "1.2.3"


@pytest.mark.parametrize(("path", "method"), ALL)
def test_every_operation_is_whole(path: str, method: str) -> None:
    operation: dict[str, Any] = DOCUMENT["paths"][path][method]
    assert operation["summary"]
    assert [parameter["name"] for parameter in operation.get("parameters", [])] == re.findall(r"{(\w+)}", path)
    assert ("requestBody" in operation) == (method == "post")


@pytest.mark.parametrize(("path", "never"), [(API + "/asample", {501, 502, 503}), ("/v1/completions", {410, 501})])
def test_every_status_is_listed(path: str, never: set[int]) -> None:
    """501 belongs to paths that are not served here, 502 and 503 to those that are passed on."""
    statuses = {*STATUS_OF_ANSWER.values(), *(status for _, status in STATUS_OF_ERROR), UNEXPECTED} - never
    assert set(DOCUMENT["paths"][path]["post"]["responses"]) == {str(status) for status in statuses}


def test_openais_paths_take_a_key_in_either_form() -> None:
    schemes = DOCUMENT["components"]["securitySchemes"]
    for _, path in OPENAI:
        for operation in DOCUMENT["paths"][path].values():
            assert {name for choice in operation["security"] for name in choice} == set(schemes)


@pytest.mark.parametrize(("path", "method"), ALL)
def test_required_fields_have_a_schema(path: str, method: str) -> None:
    body = DOCUMENT["paths"][path][method].get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        assert set(schema["required"]) <= set(schema["properties"])


def properties_of(schema: dict[str, Any]) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield name
        yield from properties_of(inner)
        for choice in inner.get("items", {}).get("anyOf", []):
            yield from properties_of(choice)


def fields_of(kind: Any) -> Iterator[str]:
    for inner in (kind, *get_args(kind)):
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            for field in msgspec.structs.fields(inner):
                yield field.name
                yield from fields_of(field.type)


# What the SDK sends and the gateway does not read.
UNREAD = {"tags", "user_metadata"}
# What has no accepted value: other kinds of prompt chunks, and what no upstream can do.
REFUSED = {"target_prompt_logprobs", "prompt_alt_tokens_k", "location", "dmel"}


@pytest.mark.parametrize("path", calls.BODIES)
def test_a_body_has_the_fields_that_are_read(path: str) -> None:
    schema = DOCUMENT["paths"][API + path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(properties_of(schema)) - UNREAD == set(fields_of(calls.BODIES[path])) - REFUSED
