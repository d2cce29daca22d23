from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from gateway.commands import findings as c
from gateway.supervision.upstream_probe import OfferedModel, to_probe
from shared.config import ModelName, Settings
from shared.core.callers import ApiKey
from shared.core.upstream_protocol import ProtocolChoice
from shared.store.contract import StoreInfo

if TYPE_CHECKING:
    from gateway.commands.findings import Finding

PORTS = (32_768, 60_999)
SETTINGS = Settings(upstreams=("http://u",), workers=2)
REDIS = StoreInfo("standalone", "9.1", 0, 4 << 30, "noeviction")


def with_settings(**changes: Any) -> Settings:
    return msgspec.structs.replace(SETTINGS, **changes)


def redis(**changes: Any) -> list[Finding]:
    from dataclasses import replace

    return c.redis(replace(REDIS, **changes), "redis://h")


@pytest.mark.parametrize(
    ("finding", "verdict", "part"),
    [
        (c.file_descriptors(20_000), "ok", "enough for about 19,936 client and upstream connections"),
        (c.file_descriptors(1024), "warning", "LimitNOFILE"),
        (c.backlog(50_000, 4096), "warning", "sysctl -w net.core.somaxconn=50000"),
        (c.backlog(4096, 4096), "ok", "4,096"),
        (c.backlog(50_000, None), "ok", "does not report"),
        (c.source_ip("10.0.0.1", None, 25_000), "ok", "25,000 upstream connections"),
        (c.source_ip("10.0.0.1", "Cannot assign", 1), "failure", "ip address add 10.0.0.1/32"),
        (c.libraries([]), "ok", "uvloop"),
        (c.libraries(["uvloop"]), "failure", "uvloop cannot be imported"),
        (c.protobuf("upb"), "ok", "upb"),
        (c.protobuf("python"), "warning", "PROTOCOL_BUFFERS"),
        (c.access(SETTINGS), "ok", "only this machine"),
        (c.access(with_settings(allow_anonymous=True)), "warning", "lets everybody in"),
        (c.access(with_settings(api_keys=(ApiKey("al", "ab"),))), "ok", "1: al"),
        (c.access(with_settings(api_keys=())), "warning", "all requests are refused"),
        (redis()[1], "ok", "noeviction"),
        (redis(policy="allkeys-lru")[1], "failure", "CONFIG SET maxmemory-policy noeviction"),
        (redis(max_bytes=0)[2], "warning", "no limit"),
        (redis(used_bytes=4 << 30)[2], "warning", "4.0 GiB of 4.0 GiB"),
        (redis()[2], "ok", "0 B of 4.0 GiB"),
        (c.secret_file("/k", 0o600), "ok", "0600"),
        (c.secret_file("/k", 0o644), "warning", "chmod 600 /k"),
        (c.clock_skew(-0.2), "ok", "-0.2 s"),
        (c.clock_skew(-0.02), "ok", "+0.0 s"),
        (c.clock_skew(61.0), "warning", "+61.0 s"),
        (c.upstream_failure("http://u", "refused", answered=False), "failure", "is it running"),
        (c.upstream_failure("http://u", "404", answered=True), "failure", "base URL"),
        (c.training("http://t", 200), "ok", "answers"),
        (c.training("http://t", 401), "warning", "--training-api-key-file"),
        (c.training("http://t", 404), "failure", "without /api/v1"),
        (c.training_failure("http://t", "refused"), "failure", "is it running"),
        (c.scaling("http://u", "m", True), "ok", "use the temperature"),
        (c.scaling("http://u", "m", None), "warning", "did not show"),
        (c.scaling("http://u", "m", False), "failure", "processed_logprobs"),
    ],
)
def test_findings(finding: Finding, verdict: str, part: str) -> None:
    """C5 (eviction), D15 (logprobs): what is wrong comes with what to do."""
    assert finding.verdict.value == verdict
    assert part in finding.detail + finding.advice
    assert bool(finding.advice) == (verdict != "ok")


def test_the_summary_counts_each_verdict() -> None:
    assert c.summary([c.ok("a", ""), c.failure("b", "", ""), c.ok("c", "")]) == "2 ok, 0 warnings, 1 failure"


BASE, ADAPTER = OfferedModel("m", 4096, None), OfferedModel("lora", None, "m")


def test_models() -> None:
    assert c.models("http://u", [BASE, ADAPTER]) == c.ok("upstream http://u", "m (context 4096)")
    assert c.models("http://u", [ADAPTER]).verdict is c.Verdict.FAILURE


def test_a_model_is_missing_when_no_upstream_offers_it() -> None:
    offered = {"http://a": [BASE, ADAPTER], "http://b": [OfferedModel("n", None, None)]}
    there, elsewhere = [ModelName("m", "m"), ModelName("other", "n")], [ModelName("x", "x"), ModelName("mine", "y")]
    assert c.missing_models(there, offered, all_answered=True) == []
    found = c.missing_models([*there, *elsewhere], offered, all_answered=True)
    assert [(f.subject, f.verdict) for f in found] == [
        ("--model x", c.Verdict.FAILURE),
        ("--model mine=y", c.Verdict.FAILURE),
    ]
    assert found[0].advice == "http://a offers lora, m; http://b offers n"


def test_a_model_may_be_that_of_an_upstream_that_does_not_answer() -> None:
    (found,) = c.missing_models([ModelName("x", "x")], {"http://a": [BASE]}, all_answered=False)
    assert found.verdict is c.Verdict.WARNING
    assert c.missing_models([ModelName("x", "x")], {}, all_answered=False) == []


def test_models_whose_logprobs_are_looked_at() -> None:
    assert to_probe([BASE, ADAPTER], []) == ["m"]
    assert to_probe([BASE, ADAPTER], [ModelName("x", "x"), ModelName("mine", "lora")]) == ["lora"]


def test_connections_are_shared_by_the_workers_of_an_address() -> None:
    one_ip = c.connections_per_worker(with_settings(workers=1), PORTS)
    assert one_ip == 25_408
    assert c.connections_per_worker(with_settings(workers=4), PORTS) == one_ip // 4
    three = with_settings(workers=4, source_ips=("a", "b", "c"))
    assert c.connections_per_worker(with_settings(workers=1, upstreams=("a", "b")), PORTS) == 2 * one_ip
    assert [c.connections_per_worker(three, PORTS, i) for i in range(3)] == [one_ip // 2, one_ip, one_ip]


def test_room_for_connections() -> None:
    few = c.connection_room(SETTINGS, PORTS)
    assert few.verdict is c.Verdict.WARNING
    assert "25,408 at once, limited by ports 32768-60999" in few.detail
    assert c.connection_room(with_settings(max_in_flight=1000), PORTS).verdict is c.Verdict.OK
    fixed = c.connection_room(with_settings(max_connections=0), PORTS)
    assert fixed.verdict is c.Verdict.OK
    assert "--max-connections is 0, no limit" in fixed.detail


def test_a_wider_range_of_ports_leaves_ours_and_those_that_are_reserved_alone() -> None:
    keep_ours = "sysctl -w net.ipv4.ip_local_reserved_ports=6379-6380,9000,8000,8001 && "
    advice = c.connection_room(SETTINGS, PORTS, reserved=[range(6379, 6381), range(9000, 9001)]).advice
    assert advice == keep_ours + 'sysctl -w net.ipv4.ip_local_port_range="1024 65535", or give more --source-ips'
    reserved = c.connection_room(SETTINGS, PORTS, reserved=[range(8000, 8002)]).advice
    assert reserved.startswith("sysctl -w net.ipv4.ip_local_port_range=")
    assert c.connection_room(with_settings(workers=8), (1024, 65535)).advice == "give more --source-ips"


def test_too_few_descriptors_are_what_is_to_be_raised() -> None:
    enough_ports = with_settings(max_in_flight=4000)
    few = c.connection_room(enough_ports, PORTS, 1024)
    assert few.verdict is c.Verdict.WARNING
    assert few.detail.startswith("1,024 at once, limited by 1,024 file descriptors per process, for up to 8,000")
    assert "ulimit -Hn; LimitNOFILE=" in few.advice
    assert "source-ips" not in few.advice
    assert c.connection_room(enough_ports, PORTS, 8000).verdict is c.Verdict.OK
    both = c.connection_room(SETTINGS, PORTS, 1024).advice
    files, ports = both.splitlines()
    assert "LimitNOFILE=" in files and "--source-ips" in ports
    ports_only = c.connection_room(SETTINGS, PORTS, 1 << 20).advice
    assert "LimitNOFILE=" not in ports_only and "--source-ips" in ports_only


def test_a_fixed_number_of_connections_that_no_ports_are_for() -> None:
    finding = c.connection_room(with_settings(max_connections=20_000), PORTS)
    assert finding.verdict is c.Verdict.WARNING
    assert "auto" in finding.advice
    assert c.connection_room(with_settings(max_connections=10_000), PORTS).verdict is c.Verdict.OK
    assert c.connection_room(with_settings(max_connections=10_000), PORTS, 12_000).verdict is c.Verdict.OK


def test_a_fixed_number_of_connections_that_no_descriptors_are_for() -> None:
    finding = c.descriptors_for_upstreams(1024, 1000)
    assert finding is not None
    assert finding.verdict is c.Verdict.FAILURE
    assert "LimitNOFILE" in finding.advice
    for enough in (None, 0, 900):
        assert c.descriptors_for_upstreams(1024, enough) is None


def test_own_ports_among_those_of_outgoing_connections() -> None:
    finding = c.own_ports([8000, 8001], (1024, 65535), [range(8001, 8002)])
    assert finding is not None
    assert finding.advice == "sysctl -w net.ipv4.ip_local_reserved_ports=8001,8000"  # as a whole: 8001 stays
    assert c.own_ports([8000, 8001], (1024, 65535), [range(8000, 8002)]) is None
    assert c.own_ports([8000], PORTS, []) is None


def test_exit_code() -> None:
    assert c.exit_code([c.ok("a", "b"), c.warning("a", "b", "c")]) == 0
    assert c.exit_code([c.ok("a", "b"), c.failure("a", "b", "c")]) == 1


@pytest.mark.parametrize(
    ("choice", "status", "verdict"),
    [
        (ProtocolChoice.GENERATE, 400, c.Verdict.OK),
        (ProtocolChoice.AUTO, 400, c.Verdict.OK),
        (ProtocolChoice.GENERATE, 403, c.Verdict.FAILURE),
        (ProtocolChoice.AUTO, 404, c.Verdict.OK),
        (ProtocolChoice.GENERATE, 503, c.Verdict.WARNING),
    ],
)
def test_generations_are_there_or_not(choice: ProtocolChoice, status: int, verdict: c.Verdict) -> None:
    found = c.generations("http://a", choice, status)
    assert found.verdict is verdict
    assert bool(found.advice) is (verdict is not c.Verdict.OK)
    assert ("--enable-scale-out" in found.advice) is (verdict is c.Verdict.FAILURE)
