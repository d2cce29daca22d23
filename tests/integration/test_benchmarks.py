"""Benchmarks that need servers and processes, in the smallest size, to check that they measure what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

from benchmarks import fairness, libraries, load_process, outstanding, pairs, run, upstream_list
from benchmarks.baselines import starlette_defaults
from benchmarks.macro import bench_runs
from benchmarks.macro.rows import Row
from benchmarks.micro import forward, serving, store
from benchmarks.turns import Plan, WrongResult

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

ONCE = Plan(rounds=1, quick=True)


async def test_store_beside_redis_py() -> None:
    found = await store.store(ONCE)
    assert [figure.contender for figure in found.figures] == [
        "gateway",
        "redis-py, pipelined once a turn",
        "redis-py, a call per command",
        "gateway",
        "gateway",
    ]
    assert len(found.notes) == 3


async def test_forward_beside_httpx_where_it_is_installed() -> None:
    found = await forward.forward(ONCE)
    assert len(found.figures) + len(found.notes) == 3
    assert [figure.contender for figure in found.figures[:2]] == ["gateway", "aiohttp"]


async def test_serving_beside_the_defaults() -> None:
    found = await serving.serving(ONCE)
    heartbeat, poll = (f"serve a {what}, 64 in flight" for what in ("small request", "poll whose result is ready"))
    assert [figure.case for figure in found.figures] == [heartbeat, heartbeat, poll, poll]
    assert [figure.contender for figure in found.figures] == ["gateway", "uvicorn and Starlette as they come"] * 2
    assert {figure.calls for figure in found.figures} == {ONCE.calls(serving.REQUESTS)}


async def test_a_poll_takes_the_hot_path_and_a_heartbeat_starlettes_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two rows would not measure what they say otherwise."""
    paths: set[str] = set()
    app = Starlette.__call__

    async def noted(self: Starlette, scope: Scope, receive: Receive, send: Send) -> None:
        # The baseline is a Starlette application too.
        if self is not baseline:
            paths.add(scope["path"])
        await app(self, scope, receive, send)

    baseline = starlette_defaults.application()
    monkeypatch.setattr(starlette_defaults, "application", lambda: baseline)
    monkeypatch.setattr(Starlette, "__call__", noted)
    await serving.serving(ONCE)
    assert "/api/v1/session_heartbeat" in paths
    assert "/api/v1/retrieve_future" not in paths


async def test_a_load_that_is_not_answered_is_wrong() -> None:
    """A poll for a sample that is not there."""
    async with serving._ours() as (url, request_id):
        with pytest.raises(WrongResult, match="poll"):
            await serving._load(url, load_process.POLL, request_id + "x")(1)


async def test_a_reply_that_ends_elsewhere_is_wrong() -> None:
    with pytest.raises(WrongResult, match="ends with"):
        forward.require_result(b'{"choices":[]')


def test_a_run_of_gateway_bench_and_one_that_fails() -> None:
    report = bench_runs.run_row(Row("small", concurrency=4, samples=8))
    assert report["samples"]["completed"] == 8
    assert report["wires"]["redis"]["received_bytes"] > 0
    with pytest.raises(WrongResult, match="ended with"):
        bench_runs.run_row(Row("impossible", concurrency=4, samples=8, workers=0))


def test_two_checkouts_are_compared_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are this one; the ratio of so few samples says nothing."""
    here = str(Path(__file__).parents[2])
    assert pairs.main([here, here, "--pairs", "2", "--samples", "400", "--concurrency", "16"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n| ") == 4  # header, rule and a row per pair
    assert "2 pairs. after / before: median" in shown
    assert pairs.main([here, "/no/such/checkout", "--pairs", "1", "--samples", "8", "--concurrency", "4"]) == 1


def test_all_steps_of_a_sample_are_measured_beside_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("redis")
    assert libraries.main(["--rounds", "1", "--quick"]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {step.name} " in shown for step in libraries.STEPS)
    assert shown.count("| total ") == 2


def test_samples_are_held_until_all_are_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    assert outstanding.main(["--samples", "8", "--workers", "1", "--client-processes", "1", "--session-poll"]) == 0
    assert "8 in flight after" in capsys.readouterr().out


def test_the_script_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert run.main(["--only", "encode", "--quick", "--rounds", "1", "--out", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["quick"] is True
    assert {figure["contender"] for figure in document["micro"]["encode"]["figures"]} >= {"gateway"}
    assert "encode 64 tokens" in capsys.readouterr().out


def test_what_was_measured_before_is_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    for name in ("encode", "request", "encode"):
        assert run.main(["--only", name, "--quick", "--rounds", "1", "--out", str(path)]) == 0
    capsys.readouterr()
    assert run.main(["--show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| encode 64 tokens ") == 3  # a line for each way
    assert "request of 128 prompt tokens" in shown
    assert "a quick run" in shown


def test_changes_of_the_list_of_upstreams_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    upstream_list.main(["--changes", "2", "--pause", "0"])
    assert "2 changes reached 4 workers of 2 hosts: median" in capsys.readouterr().out


def test_a_quiet_key_is_measured_beside_a_flood(capsys: pytest.CaptureFixture[str]) -> None:
    """E4. How long it took is not asserted: so few samples say nothing, whatever the exit code."""
    fairness.main("--samples 8 --quiet 2 --flood 40 --max-in-flight 8 --slots 4 --gen-seconds 0.05".split())
    told = capsys.readouterr().out
    assert "alone: p50" in told
    assert "beside the flood: p50" in told
    assert "refused 0 times" not in told
    assert "failed" not in told
