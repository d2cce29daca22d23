"""Scripted faults: which requests misbehave, and how. Pure; the server carries them out.

A rule is a JSON object with `kind`, the options of that kind, and the requests it applies to:

    next: n                           the next n matching requests (default: all)
    fraction: f                       this fraction of the matching requests, spread evenly
    path, model, request_id_prefix    what must match

A rule that names the path of adapter loading applies there: status, reset_before_read, delay, hold, hang; `model` is
then the name of the adapter.

Kinds, with their options:

    status (status, body, headers, delay_s)   that reply, without generation
    reset_before_read                         a TCP reset, without generation
    delay (delay_s), hang                     the generation takes longer, or never ends
    hold                                      the generation waits for POST /_sim/release
    reset_before_status (delay_s)             closed during generation without a byte, as by a killed vLLM
    reset_after_headers, reset_in_body        closed after the headers, or in the middle of the body
    abort (tokens)                            200 with finish_reason "abort" and that many tokens, as a paused engine
    null_logprobs, nan, wrong_lengths, missing_choices, bad_token (value)
    weights_changed (versions)                two versions, the second from the middle of each choice on
    html, empty, error_in_200                 a 200 that is no completion

Two kinds affect the whole server at once: drain (refuse new connections and never answer the open ones) and slow_accept
(accept nobody for delay_s; connections wait in the kernel's queue). With several processes, each counts for itself.
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
# Kinds that affect the server, not one request.
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
    """A fault and its requests. `left` counts down, None for no end; `owed` accumulates `fraction` per request."""

    fault: ScriptedFault
    match: dict[str, str]
    left: int | None = None
    fraction: float = 1.0
    owed: float = 0.0

    def applies(self, path: str, model: str, request_id: str) -> bool:
        """Return whether this request gets the fault, and count it."""
        wanted = self.match
        if self.left == 0 or wanted.get("path", path) != path or wanted.get("model", model) != model:
            return False
        if not request_id.startswith(wanted.get("request_id_prefix", "")):
            return False
        self.owed += self.fraction
        if self.owed < 1.0:
            return False
        self.owed -= 1.0
        if self.left is not None:
            self.left -= 1
        return True


def read_rules(document: Any) -> list[Rule]:
    """Read rules from `[...]` or `{"faults": [...]}`; options may also be under `do`, matches under `match`.

    Raises `ValueError` with the part that is not understood.
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
    """Return the fault of the first rule that applies to this request."""
    return next((rule.fault for rule in rules if rule.applies(path, model, request_id)), None)


def choose_named(rules: list[Rule], path: str, model: str) -> ScriptedFault | None:
    """Choose for a request that is no sample; only a rule that names its path applies."""
    return choose([rule for rule in rules if rule.match.get("path") == path], path, model, "")
