"""Replies of a real vLLM 0.32.0 and of vllm-router 0.1.17, recorded: tests/data/vllm/*.json."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.core.model import SampleSpec, SamplingParams
from shared.wire.vllm import UpstreamCall

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
    def spec(self) -> SampleSpec:
        """What a client must have asked for to get this request sent."""
        prompt = self.asked["prompt"]
        scores = self.asked.get("prompt_logprobs")
        return SampleSpec(
            ",".join(map(str, prompt)).encode(),
            len(prompt),
            self.asked.get("n", 1),
            SamplingParams(),
            prompt_logprobs=scores is not None,
            topk_prompt_logprobs=scores or 0,
            topk_sample_logprobs=self.asked.get("logprobs") or 0,
        )

    @property
    def call(self) -> UpstreamCall:
        return UpstreamCall(b"", self.asked.get("n", 1), self.asked.get("prompt_logprobs") is not None)


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
