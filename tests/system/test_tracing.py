"""Spans of a real gateway reach a collector. OpenTelemetry's libraries are an extra."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from tests.system.stack import running_stack
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
pytestmark = pytest.mark.slow
SAMPLES = 5


class Collector(ThreadingHTTPServer):
    """Takes what is posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.bodies: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self, name: bytes) -> int:
        """Of that name: a length and the text, in protobuf."""
        field = bytes((0x2A, len(name))) + name
        return sum(body.count(field) for path, body in self.bodies if path == "/v1/traces")


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def test_every_sample_is_a_span(tmp_path: Path) -> None:
    environ = "OTEL_EXPORTER_OTLP_COMPRESSION"
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv(environ, "none")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running_stack(tmp_path, "--otel-endpoint", collector.url) as stack:
            bench = [sys.executable, "-m", "gateway", "bench", "--url", stack.gateway.url, "--samples", str(SAMPLES)]
            done = subprocess.run(bench, check=False, capture_output=True, text=True, timeout=2 * DEADLINE_S)
            assert done.returncode == 0, done.stdout + done.stderr
            for name in (b"sample", b"upstream request"):
                eventually(partial(collector.spans, name), f"a span {name!r} for each", until=SAMPLES.__le__)
