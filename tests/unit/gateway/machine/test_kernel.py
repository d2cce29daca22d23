from __future__ import annotations

import os
import resource
import subprocess

import pytest

from gateway.machine import kernel
from shared.core.errors import StartError


def test_usage_of_this_process_grows_and_of_a_dead_one_is_zero() -> None:
    before = kernel.usage(os.getpid())
    sum(i * i for i in range(2_000_000))
    after = kernel.usage(os.getpid())
    assert after.cpu_seconds > before.cpu_seconds
    assert after.rss_bytes > 1 << 20
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert kernel.usage(child.pid) == kernel.Usage()


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert kernel.raise_fd_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_source_ips() -> None:
    kernel.check_source_ips(("127.0.0.1", "127.0.0.9", "::1"))
    with pytest.raises(StartError, match=r"--source-ips: 192\.0\.2\.1 cannot be bound \(Cannot assign requested"):
        kernel.check_source_ips(("127.0.0.1", "192.0.2.1"))


def test_memory_and_ports_are_plausible() -> None:
    assert kernel.memory_bytes() > 1 << 26
    low, high = kernel.ephemeral_ports()
    assert 0 < low < high < 65_536


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.check_libraries()
    monkeypatch.setattr(kernel, "_NEEDED", ("uvloop", "no_such_loop"))
    with pytest.raises(StartError, match="no_such_loop cannot be imported"):
        kernel.check_libraries()


def test_tracing_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_importable", lambda name: name != "workers.samples.tracing")
    kernel.check_libraries()
    with pytest.raises(StartError, match=r"--otel-endpoint: OpenTelemetry is not installed.*\[otel\]"):
        kernel.check_libraries(tracing=True)
