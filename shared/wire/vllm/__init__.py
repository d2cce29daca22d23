"""Ask vLLM's endpoints for a sample (`request`), check whose a reply is (`ownership`), and read it (`reply`)."""

from shared.core.upstream_protocol import UpstreamProtocol
from shared.wire.vllm.ownership import why_not_ours
from shared.wire.vllm.reply import Decoded, combine, decode_reply, reads_in_parts
from shared.wire.vllm.request import UpstreamCall, beyond_completions, completion_budget, place_images, plan_calls

__all__ = [
    "Decoded",
    "UpstreamCall",
    "UpstreamProtocol",
    "beyond_completions",
    "combine",
    "completion_budget",
    "decode_reply",
    "place_images",
    "plan_calls",
    "reads_in_parts",
    "why_not_ours",
]
