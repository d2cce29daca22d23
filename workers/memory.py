"""Memory for what is large: how the C library hands it out.

Each page that is touched for the first time interrupts the process, for a microsecond or two in a virtual machine; for
a reply of 20 MB that is half as much as parsing it. So it is asked for once, at its full length, and never moved.
"""

from __future__ import annotations

import ctypes
import io
from typing import Final

# glibc's numbers of these options.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
# From here on memory comes from the kernel alone, blank and untouched, and goes back to it at once. What is smaller is
# kept and used again, up to so much; by default glibc gives the body of each long prompt back.
_OWN_PAGES_FROM_BYTES: Final = 4 * 1024 * 1024
_KEPT_FREE_BYTES: Final = 32 * 1024 * 1024
_libc: Final = ctypes.CDLL(None)


def keep_what_is_freed() -> None:
    """Of this process, from here on; nothing where the C library is not glibc."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_MMAP_THRESHOLD, _OWN_PAGES_FROM_BYTES)
        _libc.mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


class Place:
    """Of `size_bytes`, to be written through `view`.

    A large one becomes memory page by page as it is written: a size that is only told takes none.
    """

    def __init__(self, size_bytes: int) -> None:
        # Nobody else has these bytes, so they are written in place, and are what `whole` returns.
        self._bytes = io.BytesIO(bytes(size_bytes))
        self.view: memoryview = self._bytes.getbuffer()

    def whole(self) -> bytes:
        """What was written, uncopied if no view is left anywhere. It is the end of `view`."""
        self.view.release()
        return self._bytes.getvalue()
