"""A worker that only speaks the channel protocol: what the supervisor's tests start in place of the real one.

It accepts on its socket and answers every connection with "<slot> <pid>\\n". Misbehaviour is chosen by FAKE_WORKER:

    fine              ready at once
    dies              exits with 1 before it is ready
    fails             says Failed, then exits
    hangs             ready, then never a status again; also ignores SIGABRT
    drains-slowly     on drain, stays until its deadline, like one with a sample that runs
    ignores-drain     stays for ever
    lingers           on drain, stays until it is asked to drain again; its results are fetched seconds into the drain
    fails-second      fine in the first process of a slot, dies at start in every later one (FAKE_WORKER_DIR remembers)
    spare-dies        fine, but a spare exits with 1 as soon as it is asked to prepare
    spare-hangs       fine, but a spare says that it is warm only once
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

from shared import channel

STATUS_S = 0.1
# Long enough for a test to see that the drain has begun and waits.
FETCHED_AFTER_S = 3.0


def status(in_flight: int, served: int, delivered: int, *, draining: bool) -> channel.Status:
    upstream = channel.UpstreamStatus("http://upstream", "up", 0, 0)
    counters = {"begun": served, "completed": served, "delivered": delivered}
    return channel.Status(in_flight, 10, 0.5, 1.0, True, 2, (upstream,), counters, draining)


class FakeWorker:
    def __init__(self, control: socket.socket, mode: str) -> None:
        self.listener: socket.socket | None = None
        self.warm = False
        self.control = control
        self.mode = mode
        self.partial = b""
        self.slot = -1
        self.served = 0
        self.stop_at: float | None = None
        self.fetched_at: float | None = None

    def tell(self, message: channel.ToSupervisor) -> None:
        self.control.sendall(channel.encode(message))

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while self.stop_at is None or time.monotonic() < self.stop_at:
                self.choose_sources(selector)
                ready = {key.fileobj for key, _ in selector.select(STATUS_S)}
                if self.listener is not None and self.listener in ready:
                    self.accept(self.listener)
                if self.control in ready and (code := self.read_orders()) is not None:
                    return code
                if self.slot >= 0 and self.mode != "hangs":
                    self.tell(self.status())
                elif self.warm and self.mode != "spare-hangs":
                    self.tell(channel.Warm())
        return 0

    def status(self) -> channel.Status:
        fetched = self.fetched_at is not None and time.monotonic() > self.fetched_at
        delivered = self.served if fetched else 0
        return status(int(self.fetched_at is None), self.served, delivered, draining=self.stop_at is not None)

    def choose_sources(self, selector: selectors.BaseSelector) -> None:
        if self.listener is None:
            return
        wanted = self.stop_at is None
        if wanted and self.listener not in selector.get_map():
            selector.register(self.listener, selectors.EVENT_READ)
        elif not wanted and self.listener in selector.get_map():
            selector.unregister(self.listener)

    def accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        with connection:
            self.served += 1
            connection.sendall(f"{self.slot} {os.getpid()}\n".encode())

    def read_orders(self) -> int | None:
        data, descriptors, _, _ = socket.recv_fds(self.control, 1 << 20, 1)
        if not data:
            return 0
        if descriptors:
            self.listener = socket.socket(fileno=descriptors[0])
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            if (code := self.obey(channel.decode_for_worker(line))) is not None:
                return code
        return None

    def obey(self, order: channel.ToWorker) -> int | None:
        if isinstance(order, channel.Prepare):
            return self.prepare()
        if isinstance(order, channel.Start):
            return self.start(order)
        if isinstance(order, channel.Drain):
            if self.mode == "lingers" and self.fetched_at is None:
                self.fetched_at = time.monotonic() + FETCHED_AFTER_S
            modes = {"drains-slowly": order.deadline_s, "lingers": order.deadline_s, "ignores-drain": 3600.0}
            wait_s = modes.get(self.mode, 0.0)
            self.stop_at = time.monotonic() + wait_s
        return None

    def prepare(self) -> int | None:
        if self.mode == "spare-dies":
            return 1
        self.warm = True
        self.tell(channel.Warm())
        return None

    def start(self, order: channel.Start) -> int | None:
        if self.mode == "dies" or (self.mode == "fails-second" and self.seen_before(order.config.slot)):
            return 1
        if self.mode == "fails":
            self.tell(channel.Failed("the upstream offers no model"))
            return 1
        self.slot = order.config.slot
        self.tell(channel.Ready(("model",)))
        return None

    def seen_before(self, slot: int) -> bool:
        marker = Path(os.environ["FAKE_WORKER_DIR"]) / str(slot)
        seen = marker.exists()
        marker.touch()
        return seen


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    arguments = parser.parse_args()
    mode = os.environ.get("FAKE_WORKER", "fine")
    if mode == "hangs":
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
    return FakeWorker(socket.socket(fileno=arguments.channel_fd), mode).run()


if __name__ == "__main__":
    sys.exit(main())
