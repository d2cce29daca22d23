"""Read and write bodies with a JSON library and Python lists: one object per token, as most servers do.

`loads` and `dumps` come from `json` or `orjson`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Loads = Callable[[bytes], Any]
    Dumps = Callable[[Any], str | bytes]

_STOP_REASONS = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Sequence:
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


def decode_reply(body: bytes, loads: Loads) -> list[Sequence]:
    choices = sorted(loads(body)["choices"], key=lambda choice: int(choice["index"]))
    return [_sequence(choice) for choice in choices]


def _sequence(choice: dict[str, Any]) -> Sequence:
    tokens = [int(token) for token in choice["token_ids"]]
    logprobs = [float(logprob) for logprob in choice["logprobs"]["token_logprobs"]]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} logprobs")
    return Sequence(tokens, logprobs, _STOP_REASONS[choice["finish_reason"]])


def encode_result(sequences: list[Sequence], dumps: Dumps) -> bytes:
    """Write the result as the SDK's JSON."""
    return _bytes(
        dumps(
            {
                "type": "sample",
                "sequences": [
                    {"tokens": each.tokens, "logprobs": each.logprobs, "stop_reason": each.stop_reason}
                    for each in sequences
                ],
            }
        )
    )


def build_request(body: bytes, model: str, loads: Loads, dumps: Dumps) -> bytes:
    """Turn the SDK's `asample` into a request to `/v1/completions`."""
    asked = loads(body)
    prompt = [int(token) for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]]
    params = asked["sampling_params"]
    return _bytes(
        dumps(
            {
                "model": model,
                "prompt": prompt,
                "n": asked["num_samples"],
                "max_tokens": params["max_tokens"],
                "temperature": params["temperature"],
                "top_p": params["top_p"],
                "top_k": params["top_k"],
                "seed": params["seed"],
                "logprobs": 0,
                "return_token_ids": True,
            }
        )
    )


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
