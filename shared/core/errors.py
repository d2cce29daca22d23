"""Every error the gateway raises on purpose, by whose fault it is.

`GatewayError` is the root. The leaves carry what a person needs to read; which HTTP status a leaf becomes is decided
in one table, `workers/api/replies.py`, and nowhere else.

    GatewayError
    +-- ClientError            the caller's mistake; the message is for the caller
    |   +-- BadRequest         malformed, out of range, or a field that cannot be honoured
    |   +-- BodyTooLarge       above --max-body-bytes
    |   +-- UnsupportedEncoding a Content-Encoding where none is taken
    |   +-- NotFound           an id that is not of our form, not the caller's, or an unknown model
    |   +-- SessionFinished    a submission to a session that was finished
    |   +-- Unauthorized       no key, or one that is not known
    |   +-- Forbidden          above what the key may ask for in one request
    |   +-- ClientGone         the client went away: there is nobody to answer
    |       +-- BodyIncomplete   before its body was whole, or was too slow
    +-- Overloaded             back-pressure: admission, Redis full, Redis away. Always retryable
    +-- UpstreamUnavailable    a server behind us did not get a request that was passed on: it may be sent again
    +-- UpstreamBroke          ... got it, perhaps, and did not answer whole: the caller decides
    +-- ReplyBroken            ... and its reply broke off when the client had a part of it
    +-- NotImplementedHere     a path that needs --training-upstream
    +-- StoreError             see shared/store/contract.py
    +-- ConfigError            a wrong flag; start exits with 2
    +-- StartError             the machine does not provide what the flags ask for; start exits with 3
"""

from __future__ import annotations


class GatewayError(Exception):
    """Root of all errors raised on purpose."""


class ClientError(GatewayError):
    """The caller's mistake; `str(error)` is shown to the caller."""


class BadRequest(ClientError):
    pass


class BodyTooLarge(ClientError):
    pass


class UnsupportedEncoding(ClientError):
    pass


class NotFound(ClientError):
    pass


class SessionFinished(ClientError):
    pass


class Unauthorized(ClientError):
    pass


class Forbidden(ClientError):
    pass


class ClientGone(ClientError):
    pass


class BodyIncomplete(ClientGone):
    pass


class Overloaded(GatewayError):
    """Back-pressure; `reason` is one of a bounded set of words, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UpstreamUnavailable(GatewayError):
    pass


class UpstreamBroke(GatewayError):
    pass


class ReplyBroken(GatewayError):
    pass


class NotImplementedHere(GatewayError):
    pass


class ConfigError(GatewayError):
    """A wrong value of a flag, environment variable or configuration key; one line, for the operator."""


class StartError(GatewayError):
    """Report, in one line for the operator, that the machine lacks what a correct configuration needs."""


class StoreError(GatewayError):
    """Report that the store did not do something, or that nobody knows whether it did."""


class StoreUnavailable(StoreError):
    """No usable connection. `maybe_done`: the command may have been executed (its reply was lost)."""

    def __init__(self, message: str, *, maybe_done: bool) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class StoreFull(StoreError):
    """The server refuses writes: its memory limit is reached (OOM under noeviction). Nothing was written."""


class StoreRefused(StoreError):
    """The server answered with an error that is none of the above (a bug, a missing permission)."""
