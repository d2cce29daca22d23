"""docs/compatibility.md names the versions that the tests really run, and those that the other documents measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from shared.store.schema import _OLDEST_REDIS
from tests.system.sdk_env import VERSIONS

DOCS: Final = Path(__file__).parents[2] / "docs"
TEXT: Final = (DOCS / "compatibility.md").read_text(encoding="utf-8")
UPSTREAM: Final = (DOCS / "upstream.md").read_text(encoding="utf-8")
WIRE: Final = (DOCS / "wire.md").read_text(encoding="utf-8")


def test_sdks_of_the_system_tests() -> None:
    (named,) = re.findall(r"\*\*([^*]+)\*\* run in the system tests", TEXT)
    assert tuple(re.findall(r"[\d.]+\d", named)) == VERSIONS


def test_sdks_that_were_measured() -> None:
    (counted,) = re.findall(r"(\d+ published\s+versions from [\d.]+ to [\d.]+\d)", TEXT)
    assert counted.split() == re.findall(r"(\d+ published\s+versions from [\d.]+ to [\d.]+\d)", WIRE)[0].split()


def test_servers_that_were_measured() -> None:
    for name in ("vllm-router", "sglang-router"):
        (version,) = re.findall(rf"\| {name} ([\d.]+\d) \|", TEXT)
        assert f"{name} {version}" in UPSTREAM
    (vllm,) = re.findall(r"^\| ([\d.]+\d) \| measured", TEXT, re.MULTILINE)
    assert f"vLLM {vllm}" in UPSTREAM


def test_the_oldest_redis() -> None:
    assert f"Redis {'.'.join(map(str, _OLDEST_REDIS))}" in TEXT
