"""What supervisor and worker say to each other comes back as it was said, one line each."""

from __future__ import annotations

import msgspec
import pytest

from shared import channel
from shared.channel import Drain, Failed, Prepare, Ready, Reload, Start, Status, UpstreamStatus, Warm
from shared.config import ModelName, Settings, WorkerConfig
from shared.core.callers import ApiKey
from shared.counters import Counters

SETTINGS = Settings(
    upstreams=("http://10.0.0.1:8000",),
    models=(ModelName("public", "org/base"),),
    api_keys=(ApiKey("a", "00" * 32),),
    max_connections=None,
    lora_name="{run_id}\n{checkpoint}",
)
CONFIG = WorkerConfig(settings=SETTINGS, slot=0, instance="0123456789abcdef", source_ip="127.0.0.2", redis_url="x")
STATUS = Status(
    in_flight=1,
    in_flight_bytes=2,
    loop_lag_ms_p99=0.5,
    loop_lag_ms_max=1.5,
    store_connected=True,
    sessions=3,
    upstreams=(UpstreamStatus("http://a", "up", 4, 0),),
    counters=Counters(begun=7).snapshot(),
)


@pytest.mark.parametrize("message", [Prepare(), Start(CONFIG), Drain(1.5, replaced=True), Drain(0.0), Reload(SETTINGS)])
def test_orders_come_back(message: channel.ToWorker) -> None:
    assert channel.decode_for_worker(channel.encode(message)) == message


@pytest.mark.parametrize("message", [Warm(), Ready(("m", "n")), STATUS, Failed("no such\nhost")])
def test_reports_come_back(message: channel.ToSupervisor) -> None:
    assert channel.decode_for_supervisor(channel.encode(message)) == message


@pytest.mark.parametrize("message", [Start(CONFIG), Ready(()), STATUS, Failed("two\nlines")])
def test_a_message_is_one_line(message: channel.ToWorker | channel.ToSupervisor) -> None:
    line = channel.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b'{"type":"dance"}\n', b'{"type":"drain"}\n', b"\xff\n"])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        channel.decode_for_worker(line)


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert channel.decode_for_worker(b'{"type":"drain","deadline_s":1.0,"mood":"calm"}\n') == Drain(1.0)


def test_ten_thousand_keys_fit_a_line() -> None:
    keys = tuple(ApiKey(f"key-{index:05}", f"{index:064x}") for index in range(10_000))
    assert len(channel.encode(Reload(Settings(api_keys=keys)))) < channel.MAX_LINE_BYTES
