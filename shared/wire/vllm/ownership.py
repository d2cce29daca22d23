"""Check that a reply of vLLM belongs to this request. A proxy's extra reply would shift all later ones by one.

We send `X-Request-Id: R`. vLLM's completions carry `"id":"cmpl-R"`, its generations `"request_id":"generate-tokens-R"`,
as their first member. Behind a router that writes ids of its own, the prompt decides: `prompt_token_ids` where the
reply has it, else the length in `usage`. Requests with equal prompts cannot be distinguished there, nor can
prompts with images, which vLLM expands.

A reply that names nothing passes: the decoders check whether it is a completion at all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shared.core.model import SampleSpec
    from shared.wire.json_arrays import Body

# The id is vLLM's first member; a router may put a few small ones before it.
_NAMED_WITHIN_BYTES: Final = 1024
_NAMED: Final = re.compile(rb'"(?:request_)?id"\s*:\s*"(?:cmpl-|generate-tokens-)?([^"\\]*)"')
# As `ids.request_id` writes it, with `-scores` and the attempt (`workers/samples/execution.py`).
_OURS: Final = re.compile(rb"gwss-[A-Za-z0-9_-]{32}\.[A-Za-z0-9_.~-]+:[0-9]+(?:-scores)?-a[0-9]+")
_PROMPT_KEY: Final = b'"prompt_token_ids"'
_PROMPT: Final = re.compile(rb"\s*:\s*\[([0-9,\s]*)\]")
_BLANKS: Final = b" \t\r\n"
_PROMPT_TOKENS: Final = re.compile(rb'"prompt_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')

ANOTHER_REQUEST: Final = "it names another request"
ANOTHER_PROMPT: Final = "it is for another prompt"


def why_not_ours(body: Body, request_id: str, spec: SampleSpec) -> str | None:
    """Return why the body of a 200 is not the reply to `request_id`, or None if it may be.

    No token is looked at if vLLM's own id proves the reply.
    """
    ours = request_id.encode()
    if body.startswith((b'{"id":"cmpl-%b"' % ours, b'{"request_id":"generate-tokens-%b"' % ours)):
        return None
    named = _NAMED.search(body, 0, _NAMED_WITHIN_BYTES)
    if named is not None and named[1] == ours:
        return None
    if named is not None and _OURS.fullmatch(named[1]):
        return ANOTHER_REQUEST
    return None if spec.images or _has_prompt(body, spec) else ANOTHER_PROMPT


def _has_prompt(body: Body, spec: SampleSpec) -> bool:
    """Return whether the prompt in a reply is that of `spec`; a reply without a prompt passes.

    A key cannot be mistaken for text: within a JSON string its quotes are escaped.
    """
    at = body.find(_PROMPT_KEY)
    ids = _PROMPT.match(body, at + len(_PROMPT_KEY)) if at >= 0 else None
    if ids is not None:
        return ids[1].translate(None, _BLANKS) == spec.prompt
    length = _PROMPT_TOKENS.search(body)
    return length is None or int(length[1]) == spec.prompt_tokens
