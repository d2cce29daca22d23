"""What the scripts share: a client of the installed SDK, requests from plain values, and answers as plain values.

Runs under the SDK's own interpreter, where nothing of the gateway is installed. The SDK is used as its users do: the
address and the key come from its environment variables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import Any

import tinker
from tinker import types

RESULT_S = 150.0


class KeptWarnings(logging.Handler):
    """What the SDK would show its user at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def asked() -> dict[str, Any]:
    """What the test wants, from the first line of standard input."""
    values: dict[str, Any] = json.loads(sys.stdin.readline())
    return values


def told(**values: Any) -> None:
    """One line of JSON for the test."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def service() -> Any:
    """A ServiceClient; finishes its session where the SDK can (0.27.2 and later)."""
    client = tinker.ServiceClient()
    with client if hasattr(client, "__exit__") else contextlib.nullcontext():
        yield client


def sampling_client(client: tinker.ServiceClient, **model: str) -> tinker.SamplingClient:
    made = client.create_sampling_client(**model)
    # A future from 0.38 on (of a subclass, so that it may be used as the client), the client itself before.
    return made if type(made) is tinker.SamplingClient else made.result()


def model_input(chunks: list[dict[str, Any]]) -> types.ModelInput:
    return types.ModelInput(chunks=[_chunk(chunk) for chunk in chunks])


def _chunk(chunk: dict[str, Any]) -> Any:
    if "tokens" in chunk:
        return types.EncodedTextChunk(tokens=chunk["tokens"])
    from tinker.types.image_chunk import ImageChunk

    return ImageChunk(data=chunk["image"].encode(), format="png", expected_tokens=4)


def submit(client: tinker.SamplingClient, request: dict[str, Any]) -> Any:
    """The future of `sample()`, or of `compute_logprobs()` where the request has no `num_samples`."""
    options = dict(request.get("options", {}))
    if "target_prompt_logprobs" in options:
        options["target_prompt_logprobs"] = types.TensorData(**options["target_prompt_logprobs"])
    prompt = model_input(request["prompt"])
    if "num_samples" not in request:
        return client.compute_logprobs(prompt, **options)
    params = types.SamplingParams(**request["params"])
    return client.sample(prompt, request["num_samples"], params, **options)


def outcome(future: Any) -> dict[str, Any]:
    """`{"result": ...}`, or `{"error": class, "message": ..., "category": ...}`."""
    try:
        return {"result": plain(future.result(timeout=RESULT_S))}
    except BaseException as error:
        return failure(error)


def failure(error: BaseException) -> dict[str, Any]:
    category = getattr(error, "category", None)
    return {
        "error": type(error).__name__,
        "message": str(error),
        "category": str(getattr(category, "value", category)),
    }


def plain(result: Any) -> Any:
    if not isinstance(result, types.SampleResponse):
        return result
    return {
        "sequences": [_plain_sequence(sequence) for sequence in result.sequences],
        "prompt_logprobs": result.prompt_logprobs,
        "topk_prompt_logprobs": result.topk_prompt_logprobs,
    }


def _plain_sequence(sequence: Any) -> dict[str, Any]:
    return {
        "tokens": sequence.tokens,
        "logprobs": sequence.logprobs,
        "stop_reason": sequence.stop_reason,
        "sequence_id": getattr(sequence, "sequence_id", None),
        "topk_logprobs": getattr(sequence, "topk_logprobs", None),
    }
