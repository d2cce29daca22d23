"""What the simulated model must have answered, and comparisons that name the first difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gateway.simulator import tokens as model_function
from shared.wire.sdk.result import decode_sample_response

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = list[tuple[int, float]]
_NOT_SCORED: Final = None


def prompt_of(request: dict[str, Any]) -> list[int]:
    """The tokens of all chunks of a test's request."""
    return [token for chunk in request["prompt"] for token in chunk["tokens"]]


def sequence(
    model: str, prompt: Sequence[int], params: dict[str, Any], choice: int, length: int
) -> tuple[list[int], list[float]]:
    """Tokens and reported logprobs, `length` of them, of one choice of a seeded or greedy request."""
    temperature = params.get("temperature", 1.0)
    seed = model_function.GREEDY_SEED if temperature == 0.0 else params["seed"] + choice
    tokens, logprobs = model_function.sampled(model, prompt, seed, length)
    return tokens.tolist(), model_function.reported(logprobs, temperature).tolist()


def check_sequences(sequences: Sequence[dict[str, Any]], model: str, request: dict[str, Any]) -> None:
    """Every token and logprob of a result with `num_samples` sequences; stops are the tests' own to check."""
    assert len(sequences) == request["num_samples"]
    prompt = prompt_of(request)
    params = _seeded(model, prompt, request["params"], sequences[0]["tokens"])
    for choice, found in enumerate(sequences):
        tokens, logprobs = sequence(model, prompt, params, choice, len(found["tokens"]))
        assert found["tokens"] == tokens, f"tokens of choice {choice} of {request}"
        assert found["logprobs"] == logprobs, f"logprobs of choice {choice} of {request}"


def _seeded(model: str, prompt: Sequence[int], params: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """`params` as they are, or with the seed that the simulator drew."""
    if params.get("seed") is not None or params.get("temperature") == 0.0:
        return params
    seed = model_function.find_seed(model, prompt, tokens)
    assert seed is not None, "these tokens are no sample of this prompt"
    return params | {"seed": seed}


def check_payload(payload: bytes, model: str, body: dict[str, Any]) -> None:
    """The same for an encoded result and the `asample` body that asked for it."""
    result = decode_sample_response(payload)
    sequences = [
        {
            "tokens": np.frombuffer(found.tokens, "<i4").tolist(),
            "logprobs": np.frombuffer(found.logprobs, "<f4").tolist(),
        }
        for found in result.sequences
    ]
    request = {
        "prompt": body["prompt"]["chunks"],
        "num_samples": body["num_samples"],
        "params": body["sampling_params"],
    }
    check_sequences(sequences, model, request)


def check_prompt_logprobs(
    found: Sequence[float | None], model: str, prompt: Sequence[int], *, last_n: int | None = None
) -> None:
    """One value per token, None for the first and for all before the last `last_n`."""
    scored = model_function.prompt_logprobs(model, prompt).tolist()
    first = max(1, len(prompt) - last_n) if last_n is not None else 1
    assert list(found) == [_NOT_SCORED] * first + scored[first:]


def check_topk_prompt_logprobs(found: Sequence[Row | None], model: str, prompt: Sequence[int], k: int) -> None:
    own = model_function.prompt_logprobs(model, prompt)
    ids, logprobs = model_function.prompt_alternatives(model, prompt, k)
    rows = [
        model_function.best(prompt[place], float(own[place]), ids[place], logprobs[place], k)
        for place in range(1, len(prompt))
    ]
    assert [_pairs(row) for row in found] == [_NOT_SCORED, *rows]


def check_topk_logprobs(found: dict[str, Any], model: str, request: dict[str, Any], choice: int, k: int) -> None:
    """Of one sequence of a seeded request at temperature 1."""
    prompt, length = prompt_of(request), len(found["tokens"])
    seed = request["params"]["seed"] + choice
    ids, logprobs = model_function.alternatives(model, prompt, seed, length, k)
    rows = [
        model_function.best(token, logprob, ids[place], logprobs[place], k)
        for place, (token, logprob) in enumerate(zip(found["tokens"], found["logprobs"], strict=True))
    ]
    assert [_pairs(row) for row in found["topk_logprobs"]] == rows


def _pairs(row: Sequence[Sequence[Any]] | None) -> Row | None:
    return None if row is None else [(int(token), float(logprob)) for token, logprob in row]
