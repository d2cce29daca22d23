"""What the operating system says about a failed call, in words for people."""

from __future__ import annotations

import os


def system_reason(error: OSError) -> str:
    """Return what the system says about a failed call, such as "Connection refused"; may be empty for a time-out."""
    if error.errno and (error.strerror or "").startswith("Connect call failed"):  # asyncio's words, not the system's
        return os.strerror(error.errno)
    return error.strerror or str(error)
