"""Scripted misbehaviour: which request it befalls, and what it is. Pure; the server acts on it.

A rule is a JSON object: `kind`, its own options, and which requests it is for:

    next: n           the next n requests that match        (default: all, as long as the rule stands)
    fraction: f       of those that match, spread evenly
    path, model, request_id_prefix                           what must match

kinds (options): status (status, body, headers, delay_s), delay (delay_s), hold (until POST /_sim/release), hang,
reset_before_read, reset_before_status, reset_after_headers, reset_in_body, abort (tokens), null_logprobs, nan, html,
empty, missing_choices, wrong_lengths, bad_token (value), error_in_200. Of the whole server: drain (refuses new
connections, answers none of the open ones), slow_accept (delay_s).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

KINDS: Final = frozenset(
    {
        "status",
        "delay",
        "hold",
        "hang",
        "reset_before_read",
        "reset_before_status",
        "reset_after_headers",
        "reset_in_body",
        "abort",
        "null_logprobs",
        "nan",
        "html",
        "empty",
        "missing_choices",
        "wrong_lengths",
        "bad_token",
        "error_in_200",
        "drain",
        "slow_accept",
    }
)
_MATCHED: Final = ("path", "model", "request_id_prefix")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def delay_s(self) -> float:
        return float(self.options.get("delay_s", 0.0))


@dataclass(slots=True)
class Rule:
    """`left`: how many more it befalls, None for no end. `owed` carries the fraction from request to request."""

    fault: Fault
    match: dict[str, str]
    left: int | None = None
    fraction: float = 1.0
    owed: float = 0.0

    def befalls(self, path: str, model: str, request_id: str) -> bool:
        if self.left == 0 or not self._matches(path, model, request_id):
            return False
        self.owed += self.fraction
        if self.owed < 1.0:
            return False
        self.owed -= 1.0
        if self.left is not None:
            self.left -= 1
        return True

    def _matches(self, path: str, model: str, request_id: str) -> bool:
        wanted_id = self.match.get("request_id_prefix", "")
        return (
            self.match.get("path", path) == path
            and self.match.get("model", model) == model
            and request_id.startswith(wanted_id)
        )


def read_rules(document: Any) -> list[Rule]:
    """Rules from `[...]` or `{"faults": [...]}`; options may stand in the rule or under `do`, matches under `match`.

    Raises `ValueError` naming what is not understood.
    """
    listed = document.get("faults") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise ValueError("faults must be a list of rules")
    return [_rule(item) for item in listed]


def _rule(item: Any) -> Rule:
    if not isinstance(item, dict):
        raise ValueError(f"a rule must be an object, not {item!r}")
    options = {**item, **item.get("do", {}), **item.get("match", {})}
    kind = options.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(sorted(KINDS))}")
    match = {name: str(options.pop(name)) for name in _MATCHED if name in options}
    left = options.pop("next", None)
    fraction = float(options.pop("fraction", 1.0))
    options = {name: value for name, value in options.items() if name not in ("do", "match")}
    return Rule(Fault(kind, options), match, int(left) if left is not None else None, fraction)


def choose(rules: list[Rule], path: str, model: str, request_id: str) -> Fault | None:
    """The first rule that befalls this request."""
    return next((rule.fault for rule in rules if rule.befalls(path, model, request_id)), None)
