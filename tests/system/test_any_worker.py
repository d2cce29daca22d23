"""Requests of one client on different workers, over raw HTTP: nothing may depend on where a connection landed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from gateway.settings.keys_file import new_entry
from shared.core.callers import NO_LIMITS
from tests.system.expected import check_payload
from tests.system.outcomes import result_of, settled
from tests.system.pinned import Client, connect_to, open_stack_client, poll, send_poll, submit
from tests.system.stack import Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.system.http_calls import Connection

pytestmark = pytest.mark.slow

ALICE: Final = "tml-alice-key-of-the-any-worker-tests"
BOB: Final = "tml-bob-key-of-the-any-worker-tests"
PROMPT: Final = [11, 12, 13]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("any-worker")
    keys = directory / "keys.toml"
    keys.write_text(new_entry("alice", ALICE, NO_LIMITS) + new_entry("bob", BOB, NO_LIMITS))
    flags = ["--api-keys-file", str(keys), "--poll-timeout", "5"]
    with running_stack(directory, *flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def key() -> str:
    """That of the connections."""
    return ALICE


@pytest.fixture(autouse=True)
def well_behaved(stack: Stack) -> None:
    stack.simulator.script()


def test_a_result_is_retrieved_from_the_worker_that_did_not_run_it(
    client: Client, first: Connection, second: Connection
) -> None:
    body = client.body(1, PROMPT)
    promise = submit(first, body)
    assert result_of(second, promise["request_id"], client, body) == result_of(
        first, promise["request_id"], client, body
    )


def test_a_held_poll_on_the_other_worker_is_woken_by_the_result(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    body = client.body(1, PROMPT)
    with stack.simulator.holding():
        send_poll(second, submit(first, body)["request_id"])
        stack.simulator.runs(1)
    reply = second.receive()
    assert reply.status == 200
    check_payload(reply.body, client.model, body)


def test_a_submission_whose_reply_was_lost_is_the_same_sample_elsewhere(
    stack: Stack, client: Client, second: Connection
) -> None:
    """A6, A8: same promise from the other worker, and the upstream is asked once."""
    body = client.body(6, PROMPT, num_samples=4)
    executions = stack.simulator.stats()["executions"]
    lost = connect_to(stack.gateway, 0, ALICE)
    lost.send("POST", "/api/v1/asample", body)
    eventually(lambda: stack.simulator.stats()["executions"] > executions, "the lost submission upstream")
    lost.close()
    promise = submit(second, body)
    assert len(set(promise["sample_sequence_ids"])) == 4
    assert submit(second, body) == promise
    result_of(second, promise["request_id"], client, body)
    assert stack.simulator.stats()["executions"] == executions + 1


@pytest.mark.parametrize("n", [1, 4, 7])
def test_a_promise_names_as_many_sequences_as_were_asked_for(
    client: Client, first: Connection, second: Connection, n: int
) -> None:
    """A8: unique, and the same ones on a repeated submission, before and after the sample settled."""
    body = client.body(8, PROMPT, num_samples=n)
    promise = submit(first, body)
    assert len(set(promise["sample_sequence_ids"])) == n
    assert submit(second, body) == promise
    result_of(second, promise["request_id"], client, body)
    assert submit(second, body) == promise
    assert submit(first, body) == promise


@pytest.mark.parametrize(
    "request_id", ["abc", "", "x" * 10_240, "ü:1", "\N{SNOWMAN}", "gwss-.gws-.b:1", "1:-1", "1:1:1"]
)
def test_an_id_that_is_not_of_our_form_is_a_plain_404(first: Connection, second: Connection, request_id: str) -> None:
    """A7"""
    replies = [poll(connection, request_id) for connection in (first, second)]
    assert [reply.status for reply in replies] == [404, 404]
    assert {reply.body for reply in replies} == {b'{"detail":"there is no such request"}'}


def test_an_id_that_is_no_text_is_refused(first: Connection) -> None:
    """A7: half of a surrogate pair."""
    assert poll(first, "\ud800").status in (400, 404)


def test_a_well_formed_id_that_is_not_there_any_more_is_410(
    client: Client, first: Connection, second: Connection
) -> None:
    """A7: gone is retryable, foreign is not."""
    for connection in (first, second):
        assert poll(connection, f"{client.sampling_session_id}:77").status == 410


def test_a_huge_number_as_an_id_slows_nobody_down(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """A19: a plain 404, while a poll of somebody else is held on the same worker and answered in its turn."""
    body = client.body(19, PROMPT)
    with stack.simulator.holding():
        send_poll(second, submit(first, body)["request_id"])
        stack.simulator.runs(1)
        assert poll(first, "100000000000000000000").status == 404
    held = second.receive()
    assert held.status == 200
    check_payload(held.body, client.model, body)


@pytest.mark.parametrize("seq_id", [0, 2**53, 2**53 + 1, 2**63 - 1])
def test_every_seq_id_of_64_bits_is_itself(
    stack: Stack, client: Client, first: Connection, second: Connection, seq_id: int
) -> None:
    """A10, A14: 0 is a value, neighbours above 2**53 do not collapse, and a repetition is the same sample."""
    mine, neighbour = client.body(seq_id, PROMPT), client.body(seq_id ^ 1, [*PROMPT, 1])
    executions = stack.simulator.stats()["executions"]
    promises = [submit(first, mine), submit(second, neighbour), submit(second, mine)]
    assert promises[0] == promises[2]
    assert promises[0]["request_id"] != promises[1]["request_id"]
    result_of(second, promises[0]["request_id"], client, mine)
    result_of(first, promises[1]["request_id"], client, neighbour)
    assert stack.simulator.stats()["executions"] == executions + 2


@pytest.mark.parametrize("seq_id", [2**63, 2**64, -1, 1.5, "1"])
def test_a_seq_id_outside_of_64_bits_is_refused(client: Client, first: Connection, seq_id: Any) -> None:
    """A10"""
    reply = first.post("/api/v1/asample", client.body(0, PROMPT) | {"seq_id": seq_id})
    assert reply.status == 400
    assert "seq_id" in reply.json()["detail"]


def test_two_sampling_sessions_share_no_seq_id(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """A5: both use seq_id 1 at once, with different prompts, on different workers."""
    other_id = client.sampling_session(second, 1)
    mine = client.body(1, PROMPT)
    other = client.body(1, [*PROMPT, 5], sampling_session_id=other_id)
    with stack.simulator.holding():
        first.send("POST", "/api/v1/asample", mine)
        second.send("POST", "/api/v1/asample", other)
        mine_id, other_request_id = first.receive().json()["request_id"], second.receive().json()["request_id"]
        stack.simulator.runs(2)
    result_of(second, mine_id, client, mine)
    result_of(first, other_request_id, client, other)


def test_creating_a_sampling_session_is_idempotent_on_any_worker(
    client: Client, first: Connection, second: Connection
) -> None:
    assert client.sampling_session(first, 3) == client.sampling_session(second, 3)
    assert client.sampling_session(first, 3) != client.sampling_session(first, 4)


def test_the_same_seq_id_with_another_payload_is_refused(client: Client, first: Connection, second: Connection) -> None:
    """A18: on both workers, running and settled, with nothing of the first one in the reply."""
    body = client.body(18, [31337, *PROMPT])
    request_id = submit(first, body)["request_id"]
    for connection in (first, second, first):
        reply = connection.post("/api/v1/asample", client.body(18, [4, 5, 6]))
        assert reply.status == 400
        assert "seq_id" in reply.json()["detail"]
        assert b"31337" not in reply.body
        result_of(connection, request_id, client, body)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_samples", 0), ("num_samples", -3), ("num_samples", 100_000), ("max_tokens", 0), ("max_tokens", -1)],
)
def test_numbers_out_of_range_are_refused_before_anything_is_forwarded(
    stack: Stack, client: Client, first: Connection, field: str, value: int
) -> None:
    """A21"""
    received = stack.simulator.stats()["received"]
    change: dict[str, Any] = {field: value} if field == "num_samples" else {"params": {field: value}}
    reply = first.post("/api/v1/asample", client.body(21, PROMPT, **change))
    assert reply.status == 400
    assert field in reply.json()["detail"]
    assert stack.simulator.stats()["received"] == received


def test_greedy_samples_are_one_generation(stack: Stack, client: Client, first: Connection, second: Connection) -> None:
    """D12: four identical sequences; the upstream refuses n > 1 at temperature 0."""
    body = client.body(12, PROMPT, num_samples=4, params={"temperature": 0.0})
    executions = stack.simulator.stats()["executions"]
    result_of(second, submit(first, body)["request_id"], client, body)
    assert stack.simulator.stats()["executions"] == executions + 1


def test_an_empty_chunk_counts_for_nothing_and_an_empty_prompt_is_refused(client: Client, first: Connection) -> None:
    """A17"""
    chunks = [{"type": "encoded_text", "tokens": tokens} for tokens in ([], PROMPT, [])]
    body = client.body(17, PROMPT) | {"prompt": {"chunks": chunks}}
    result_of(first, submit(first, body)["request_id"], client, client.body(17, PROMPT))
    for empty in ([], chunks[:1]):
        reply = first.post("/api/v1/asample", client.body(18, PROMPT) | {"prompt": {"chunks": empty}})
        assert reply.status == 400
        assert "empty" in reply.json()["detail"]


class TestAnotherKey:
    """A11: what is Alice's does not exist for Bob, whatever he asks, and stays as it is."""

    @pytest.fixture
    def bob(self, stack: Stack) -> Iterator[Connection]:
        connection = connect_to(stack.gateway, 1, BOB)
        yield connection
        connection.close()

    def test_retrieves_and_cancels_nothing(
        self, stack: Stack, client: Client, first: Connection, bob: Connection
    ) -> None:
        body = client.body(11, PROMPT)
        with stack.simulator.holding():
            request_id = submit(first, body)["request_id"]
            stack.simulator.runs(1)
            for path in ("retrieve_future", "cancel_future"):
                seen = bob.post(f"/api/v1/{path}", {"request_id": request_id})
                unknown = bob.post(f"/api/v1/{path}", {"request_id": "abc"})
                assert (seen.status, seen.body) == (unknown.status, unknown.body) == (404, unknown.body)
        result_of(first, request_id, client, body)
        assert bob.post("/api/v1/retrieve_future", {"request_id": request_id}).status == 404

    def test_acknowledges_and_sees_no_completions(
        self, client: Client, first: Connection, second: Connection, bob: Connection
    ) -> None:
        body = client.body(12, PROMPT)
        request_id = submit(first, body)["request_id"]
        result_of(first, request_id, client, body)
        for ssid in (client.sampling_session_id, "gwss-unknown"):
            target = {"type": "sampling_session", "sampling_session_id": ssid, "cloned_sampler_id": 0}
            ack = {"target": target, "prev_cursor": 5, "timeout": 0.0, "retrieved_request_ids": [request_id]}
            reply = bob.post("/api/v1/retrieve_futures", ack)
            assert (reply.status, reply.json()) == (200, {"completions": [], "cursor": 5})
        target = {"type": "sampling_session", "sampling_session_id": client.sampling_session_id}
        page = second.post("/api/v1/retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0.0}).json()
        assert [entry["request_id"] for entry in page["completions"]] == [request_id]

    def test_keeps_no_session_alive_and_ends_none(self, client: Client, first: Connection, bob: Connection) -> None:
        for session_id in (client.session_id, "gws-unknown"):
            assert bob.post("/api/v1/session_heartbeat", {"session_id": session_id}).status == 404
            assert bob.post(f"/api/v1/sessions/{session_id}/finish", {}).status == 404
        assert first.post("/api/v1/session_heartbeat", {"session_id": client.session_id}).status == 200

    def test_submits_and_joins_nowhere(self, client: Client, bob: Connection) -> None:
        for ssid in (client.sampling_session_id, "gwss-unknown"):
            assert bob.post("/api/v1/asample", client.body(1, PROMPT, sampling_session_id=ssid)).status == 404
            assert bob.post("/api/v1/join_sampling_session", {"sampling_session_id": ssid}).status == 404
            assert bob.get(f"/api/v1/samplers/{ssid}").status == 404

    def test_no_key_at_all_is_told_so(self, stack: Stack, client: Client) -> None:
        for key in (None, "tml-wrong", ""):
            connection = stack.gateway.connect(key)
            assert connection.post("/api/v1/asample", client.body(1, PROMPT)).status == 401
            connection.close()


def test_a_cancel_reaches_the_worker_that_runs_the_sample(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    """D7: the upstream connection is closed, and the sample ends as a failure by the user's wish."""
    aborted = stack.simulator.stats()["aborted"]
    with stack.simulator.holding():
        request_id = submit(first, client.body(30, PROMPT))["request_id"]
        stack.simulator.runs(1)
        assert second.post("/api/v1/cancel_future", {"request_id": request_id}).status == 200
        eventually(lambda: stack.simulator.stats()["aborted"] > aborted, "the abort upstream")
    reply = settled(second, request_id)
    assert (reply.status, reply.json()["category"]) == (200, "user")


def test_a_finish_ends_what_runs_on_every_worker(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    aborted = stack.simulator.stats()["aborted"]
    with stack.simulator.holding():
        request_ids = [
            submit(connection, client.body(seq, PROMPT))["request_id"] for seq, connection in enumerate((first, second))
        ]
        stack.simulator.runs(2)
        assert (
            second.post(f"/api/v1/sessions/{client.session_id}/finish", {"reason": {"type": "success"}}).status == 200
        )
        eventually(lambda: stack.simulator.stats()["aborted"] >= aborted + 2, "both aborts upstream")
    for connection, request_id in zip((second, first), request_ids, strict=True):
        assert settled(connection, request_id).status == 410
        assert connection.post("/api/v1/session_heartbeat", {"session_id": client.session_id}).status == 410
        assert connection.post("/api/v1/asample", client.body(99, PROMPT)).status in (404, 410)


def test_each_worker_speaks_to_the_upstream_from_its_own_address(
    stack: Stack, client: Client, first: Connection, second: Connection
) -> None:
    for seq, connection in enumerate((first, second), 50):
        body = client.body(seq, PROMPT)
        result_of(connection, submit(connection, body)["request_id"], client, body)
    assert {"127.0.0.2", "127.0.0.3"} <= set(stack.simulator.stats()["by_source_ip"])


def test_both_workers_are_used(stack: Stack) -> None:
    for slot in (0, 1):
        connection, client = open_stack_client(stack, slot, ALICE)
        body = client.body(0, PROMPT)
        result_of(connection, submit(connection, body)["request_id"], client, body)
        connection.close()
