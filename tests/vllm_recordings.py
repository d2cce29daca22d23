"""Replies of a real vLLM 0.32.0 and of vllm-router 0.1.17, recorded: tests/data/vllm/*.json."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.core.model import SampleSpec, SamplingParams
from shared.wire.vllm import UpstreamCall, UpstreamProtocol

_FOLDER: Final = Path(__file__).parent / "data" / "vllm"
NAMES: Final = sorted(path.stem for path in _FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Recording:
    path: str
    asked: dict[str, Any]
    status: int | None
    headers: dict[str, str]
    body: bytes

    @property
    def protocol(self) -> UpstreamProtocol:
        generates = self.path == UpstreamProtocol.GENERATE.path
        return UpstreamProtocol.GENERATE if generates else UpstreamProtocol.COMPLETIONS

    @property
    def params(self) -> dict[str, Any]:
        """Where the sampling parameters are."""
        params: dict[str, Any] = self.asked.get("sampling_params", self.asked)
        return params

    @property
    def spec(self) -> SampleSpec:
        """What a client must have asked for to get this request sent."""
        generates = self.protocol is UpstreamProtocol.GENERATE
        prompt = self.asked["token_ids" if generates else "prompt"]
        scores = self.params.get("prompt_logprobs")
        topk = self.params.get("logprobs") or 0
        return SampleSpec(
            ",".join(map(str, prompt)).encode(),
            len(prompt),
            self.params.get("n", 1),
            SamplingParams(),
            prompt_logprobs=scores is not None,
            topk_prompt_logprobs=scores or 0,
            # A generation counts the sampled token as one of them.
            topk_sample_logprobs=max(topk - 1, 0) if generates else topk,
        )

    @property
    def call(self) -> UpstreamCall:
        scores = self.params.get("prompt_logprobs") is not None
        return UpstreamCall(b"", self.params.get("n", 1), scores, self.protocol)


def recording(name: str) -> Recording:
    document = json.loads((_FOLDER / f"{name}.json").read_text())
    request, response = document["request"], document["response"]
    try:
        asked = json.loads(request.get("body") or "{}")
    except ValueError:
        asked = {}
    body = (response["body"] or "").encode()
    return Recording(request["path"], asked, response["status"], response["headers"] or {}, body)


def large_body() -> bytes:
    """The whole body of a completion of 16,000 tokens after the prompt 10, 11, 12."""
    return gzip.decompress((_FOLDER / "completion-16384-tokens.body.json.gz").read_bytes())
