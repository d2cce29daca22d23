"""Scripted misbehaviour: which request it befalls, and what it is. Pure; the server acts on it.

A rule is a JSON object: `kind`, its own options, and which requests it is for:

    next: n           the next n requests that match        (default: all, as long as the rule stands)
    fraction: f       of those that match, spread evenly
    path, model, request_id_prefix                           what must match

Loading an adapter misbehaves, too, where a rule names its path: status, reset_before_read, delay, hold, hang; `model`
is the adapter's name then.

kinds (options):

    status (status, body, headers, delay_s)   that reply, without any generation
    reset_before_read                         a TCP reset, without any generation
    delay (delay_s), hang                     the generation takes longer, or for ever
    hold                                      it waits for POST /_sim/release
    reset_before_status (delay_s)             closed after the generation began, without a byte, as a killed vLLM does
    reset_after_headers, reset_in_body        closed there
    abort (tokens)                            200, finish_reason "abort", so many tokens: as a paused engine answers
    null_logprobs, nan, wrong_lengths, missing_choices, bad_token (value)
    weights_changed (versions)                two versions, the second from the middle of each choice on
    html, empty, error_in_200                 a 200 that is no completion

Of the whole server, at once: drain (refuses new connections, answers none of the open ones, for good), slow_accept
(accepts nobody for delay_s; those who come wait in the kernel's queue). With several processes each counts for itself.
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
        "weights_changed",
        "drain",
        "slow_accept",
    }
)
# These befall the server, not a request.
SERVER_KINDS: Final = frozenset({"drain", "slow_accept"})
_MATCHED: Final = ("path", "model", "request_id_prefix")


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def delay_s(self) -> float:
        return float(self.options.get("delay_s", 0.0))


@dataclass(slots=True)
class Rule:
    """`left`: how many more it befalls, None for no end. `owed` carries the fraction from request to request."""

    fault: ScriptedFault
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
    options = {name: value for name, value in item.items() if name not in ("do", "match")}
    options.update(_object(item, "do"))
    kind = options.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(sorted(KINDS))}")
    options.update(_object(item, "match"))
    match = {name: str(options.pop(name)) for name in _MATCHED if name in options}
    left = options.pop("next", None)
    if left is not None and type(left) is not int:
        raise ValueError(f"next must be a number of requests, not {left!r}")
    fraction = options.pop("fraction", 1.0)
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction!r}")
    return Rule(ScriptedFault(kind, options), match, left, float(fraction))


def _object(item: dict[str, Any], name: str) -> dict[str, Any]:
    value = item.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def choose(rules: list[Rule], path: str, model: str, request_id: str) -> ScriptedFault | None:
    """The first rule that befalls this request."""
    return next((rule.fault for rule in rules if rule.befalls(path, model, request_id)), None)


def choose_named(rules: list[Rule], path: str, model: str) -> ScriptedFault | None:
    """The same for a request that is no sample: only a rule that names its path is meant for it."""
    return choose([rule for rule in rules if rule.match.get("path") == path], path, model, "")
