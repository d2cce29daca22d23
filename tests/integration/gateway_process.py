"""A gateway with fake workers as a process of its own, for the supervisor's tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests import started
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    import signal

ROOT = Path(__file__).parents[2]
_SHOWN_CHARS: Final = 12_000


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@dataclass
class GatewayProcess:
    """Context manager. `worker` is the fake worker's misbehaviour, `flags` what serve is given besides.

    `hung_after_s`: where a silent worker is what the test is about; the real thing's time otherwise. With
    `module="gateway"` it is the real thing.
    """

    directory: Path
    worker: str = "fine"
    workers: int = 2
    flags: tuple[str, ...] = ()
    module: str = "tests.integration.supervised"
    hung_after_s: float | None = None
    popen: subprocess.Popen[bytes] = field(init=False)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", self.module, "serve", "--upstream", "http://127.0.0.1:1"]
        command += ["--port", "0", "--admin-port", "0", "--workers", str(self.workers), "--log-format", "json"]
        environ = {**os.environ, "FAKE_WORKER": self.worker, "FAKE_WORKER_DIR": str(self.directory)}
        if self.hung_after_s is not None:
            environ["HUNG_AFTER_S"] = str(self.hung_after_s)
        environ["XDG_RUNTIME_DIR"] = str(self.directory)  # what a killed gateway leaves goes with the test
        with (self.directory / "out").open("wb") as out, (self.directory / "err").open("wb") as err:
            self.popen = subprocess.Popen([*command, *self.flags], stdout=out, stderr=err, cwd=ROOT, env=environ)
        started.remember(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def exit_code(self) -> int:
        return self.popen.wait(DEADLINE_S)

    @property
    def name(self) -> str:
        return "gateway"

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def log(self) -> str:
        return (self.output + self.errors)[-_SHOWN_CHARS:]

    @property
    def output(self) -> str:
        return (self.directory / "out").read_text()

    @property
    def errors(self) -> str:
        return (self.directory / "err").read_text()

    def logged(self, message: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.errors.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if message in line["message"]]

    def ready_line(self) -> str:
        def line() -> str | None:
            assert self.popen.poll() is None, self.errors
            return self.output if self.output.endswith("\n") else None

        return eventually(line, "the start line")

    @property
    def public(self) -> tuple[str, int]:
        host, _, port = self.ready_line().split("ready: http://")[1].split()[0].rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def admin_url(self) -> str:
        return self.ready_line().split("admin ")[1].split(";")[0]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.admin_url + path, timeout=DEADLINE_S) as reply:
            return json.loads(reply.read())

    def post(self, path: str) -> Any:
        request = urllib.request.Request(self.admin_url + path, method="POST")
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return json.loads(reply.read())

    def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = self.get("/status")["workers"]
        return slots

    def pids(self) -> list[int]:
        return [slot["pid"] for slot in self.slots()]

    def warm_spare(self, but: int | None = None) -> int:
        """The pid of the spare, once it is warm and another than `but`."""

        def pid() -> int | None:
            spare = self.get("/status")["spare"]
            return spare["pid"] if spare and spare["state"] == "warm" and spare["pid"] != but else None

        return eventually(pid, "a warm spare")

    def ask(self) -> tuple[int, int]:
        """Connect to the public address: which slot and which process answered. Raises `OSError`."""
        with socket.create_connection(self.public, timeout=DEADLINE_S) as connection:
            data = b""
            while not data.endswith(b"\n"):
                if not (more := connection.recv(100)):
                    raise ConnectionResetError("closed without an answer")
                data += more
        slot, pid = data.split()
        return int(slot), int(pid)
