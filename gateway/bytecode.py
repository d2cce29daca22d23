"""Byte code for the workers where Python may not keep it beside the source.

In containers it is often forbidden (PYTHONDONTWRITEBYTECODE, a file system that is read only), and every process then
compiles all that it imports: more than half of a worker's start. The run directory is private, and takes the 12 MB.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# Stands for all that is installed: the largest package of those that a worker compiles.
_PROBE: Final = "aiohttp"
_FORBIDDEN: Final = "PYTHONDONTWRITEBYTECODE"
_PREFIX: Final = "PYTHONPYCACHEPREFIX"


def worker_environ(environ: Mapping[str, str], run_dir: Path, *, kept: bool) -> dict[str, str]:
    """What a worker's process gets. `kept`: byte code stands, or will, where Python looks for it by itself."""
    if kept:
        return dict(environ)
    rest = {name: value for name, value in environ.items() if name != _FORBIDDEN}
    return {**rest, _PREFIX: str(run_dir / "bytecode")}


def is_kept(probe: str = _PROBE) -> bool:
    """Whether the next process finds the byte code of what this one imports."""
    spec = importlib.util.find_spec(probe)
    if spec is None or spec.cached is None or spec.origin is None or Path(spec.cached).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
