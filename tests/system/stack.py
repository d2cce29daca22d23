"""A whole installation as users run it: simulated vLLM, gateway with its workers, Redis; every one a real process."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.ports import free_port, is_free
from tests.system.http_calls import Connection, call
from tests.system.processes import Process
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_URL: Final = re.compile(r"https?://[0-9A-Za-z.:\[\]]+")
_GATEWAY: Final = (sys.executable, "-m", "gateway")
# Both workers bind an address of their own, as in production.
SOURCE_IPS: Final = "127.0.0.2,127.0.0.3"
WORKERS: Final = 2


class Simulator:
    """The simulated vLLM and its control paths."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.process = Process("simulator", [*_GATEWAY, "simulate-vllm", "--port", "0", *flags], directory)
        try:
            self.url = _URL.findall(self.process.ready_line())[0].rstrip("/.")
        except BaseException:
            self.process.kill()
            raise

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = call("GET", f"{self.url}/_sim/stats").json()
        return found

    def script(self, *faults: dict[str, Any]) -> None:
        """Misbehave from now on as the faults say; none at all when there are none."""
        reply = call("POST", f"{self.url}/_sim/faults", {"faults": list(faults)})
        assert reply.status == 200, reply

    @property
    def port(self) -> str:
        return str(self.url.rpartition(":")[2])

    @contextmanager
    def holding(self) -> Iterator[None]:
        """What reaches it within the block is answered when the block is over."""
        self.script({"kind": "hold"})
        try:
            yield
        finally:
            self.script()
            assert call("POST", f"{self.url}/_sim/release").status == 200

    def runs(self, samples: int) -> None:
        """Wait until so many generations are running."""
        eventually(self.stats, f"{samples} generations", until=lambda seen: seen["in_flight"] >= samples)


class Gateway:
    """`gateway serve` on free ports. `url` and `port` stay the same over `restart`."""

    def __init__(self, directory: Path, upstream: str, *flags: str, env: dict[str, str] | None = None) -> None:
        """`env`: the environment of its processes, if not this one's."""
        self._directory = directory
        self._env = env
        self._flags = ["--upstream", upstream, *flags]
        self._run_dir = Path(tempfile.mkdtemp(prefix="gw-"))  # short: it holds a UNIX socket
        self._start(free_port())

    def _start(self, port: int) -> None:
        flags = ["--port", str(port), "--admin-port", "0", "--run-dir", str(self._run_dir), *self._flags]
        self.process = Process("gateway", [*_GATEWAY, "serve", *flags], self._directory, env=self._env)
        try:
            self.url, self.admin_url = (found.rstrip("/.") for found in _URL.findall(self.process.ready_line())[:2])
        except BaseException:
            self.close()
            raise

    def kill_and_restart(self) -> None:
        """SIGKILL for every process of it, and a new one on the same port."""
        self.process.kill()
        port = int(self.url.rpartition(":")[2])
        # Its workers, which we cannot wait for, hold the port until the kernel has cleared them away.
        eventually(lambda: is_free(port), f"port {port} to be free")
        self._start(port)

    def close(self) -> None:
        self.process.kill()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def connect(self, key: str | None = None) -> Connection:
        return Connection(self.url, {"X-API-Key": key} if key is not None else {})

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = call("GET", f"{self.admin_url}/status").json()
        return found

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["workers"]
        return found

    def counter(self, name: str) -> int:
        value: int = self.status()["counters"].get(name, 0)
        return value

    def counter_reaches(self, name: str, value: int) -> None:
        """Workers report once a second."""
        eventually(lambda: self.counter(name), f"{name} >= {value}", until=lambda seen: seen >= value)


class Stack:
    """`directory` holds the logs of all its processes."""

    def __init__(self, directory: Path, simulator: Simulator, gateway: Gateway) -> None:
        self.directory = directory
        self.simulator = simulator
        self.gateway = gateway

    @property
    def model(self) -> str:
        name: str = call("GET", f"{self.simulator.url}/v1/models").json()["data"][0]["id"]
        return name


@contextmanager
def running_stack(directory: Path, *flags: str, simulator_flags: Sequence[str] = ()) -> Iterator[Stack]:
    """Two workers with a source IP each unless `flags` say otherwise. All of it is gone afterwards, come what may."""
    with (
        running_simulator(directory, *simulator_flags) as simulator,
        running_gateway(directory, simulator, *flags) as stack,
    ):
        yield stack


@contextmanager
def running_simulator(directory: Path, *flags: str) -> Iterator[Simulator]:
    simulator = Simulator(directory, *flags)
    try:
        yield simulator
    finally:
        simulator.process.kill()


@contextmanager
def running_gateway(directory: Path, simulator: Simulator, *flags: str) -> Iterator[Stack]:
    """A gateway in front of a simulator that the caller runs."""
    defaults = ["--workers", str(WORKERS), "--source-ips", SOURCE_IPS, "--log-format", "text"]
    gateway = Gateway(directory, simulator.url, *defaults, *flags)
    try:
        yield Stack(directory, simulator, gateway)
    finally:
        gateway.close()
