"""vLLM's `/v1/completions`: how a sample is asked (`vllm_request.py`) and how the answer is read (`vllm_reply.py`)."""

from shared.wire.vllm_reply import Decoded, combine, decode_reply
from shared.wire.vllm_request import PATH, UpstreamCall, plan_calls, room

__all__ = ["PATH", "Decoded", "UpstreamCall", "combine", "decode_reply", "plan_calls", "room"]
