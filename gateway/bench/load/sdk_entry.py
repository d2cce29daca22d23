"""Start the SDK load client: `PYTHON -P sdk_entry.py`, with the interpreter of an SDK's environment.

Our package is not installed there. The few modules of ours that the client needs are found next to this file;
everything else, the SDK above all, comes from that environment.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_ROOT = Path(__file__).resolve().parents[3]


class OurPackage(MetaPathFinder):
    """Find the package `gateway`, and nothing else that lies beside it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(_ROOT)]) if fullname == "gateway" else None


if __name__ == "__main__":
    sys.meta_path.insert(0, OurPackage())
    from gateway.bench.load.sdk_client import main

    main()
