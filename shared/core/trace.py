"""W3C trace context: the one header that ties a client's span, ours and the upstream's together."""

from __future__ import annotations

import re
from typing import Final

# version - trace id - parent id - flags (https://www.w3.org/TR/trace-context/, 3.2). A later version may append more,
# which need not be passed on; version ff is forbidden, and so are ids of zeros.
_FORM: Final = re.compile(rb"(?!ff)([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?:-[ -~]*)?")
_LENGTH: Final = 55


def traceparent_of(header: bytes | None) -> str | None:
    """What may be passed on of a client's `traceparent`; None for anything that is not one."""
    if header is None:
        return None
    found = _FORM.fullmatch(header)
    if found is None or (header.startswith(b"00-") and len(header) != _LENGTH):
        return None
    return found[1].decode()
