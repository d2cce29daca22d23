"""Requests that never reach the application, and the reply that says why."""

from __future__ import annotations

import json
from http import HTTPStatus

import httptools


class Refusal(Exception):
    """A request that breaks the protocol or a limit; `status` is an HTTP status, `detail` is for the caller."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def refusal_of(error: httptools.HttpParserError) -> Refusal:
    """What the parser's error means: the refusal raised in one of our callbacks, or else its own complaint."""
    cause = error.__context__
    if isinstance(cause, Refusal):
        return cause
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request's method is not one of HTTP's.")
    if isinstance(error, httptools.HttpParserInvalidURLError) or isinstance(cause, httptools.HttpParserInvalidURLError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request's target is not a valid URL.")
    if isinstance(error, httptools.HttpParserCallbackError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request could not be understood.")
    return Refusal(HTTPStatus.BAD_REQUEST, f"The request is not valid HTTP/1.1: {error}.")


def encode(refusal: Refusal) -> bytes:
    """The whole reply, as it goes over the wire."""
    body = json.dumps({"detail": refusal.detail}).encode()
    head = (
        f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
