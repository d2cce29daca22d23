"""The supervisor with real processes, sockets and signals; only the workers are fake."""

from __future__ import annotations

import os
import signal
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.gateway_process import GatewayProcess, alive
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_start_line_status_and_a_clean_stop(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, workers=3) as gateway:
        line = gateway.ready_line()
        assert line.count("\n") == 1
        host, port = gateway.public
        assert f"export TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY=tml-" in line
        assert "3 workers, results in nothing, admin http://127.0.0.1:" in line
        assert [slot["state"] for slot in gateway.slots()] == ["ready"] * 3
        assert eventually(lambda: gateway.get("/readyz")["ready"], "a first status of a worker")
        assert gateway.get("/livez")["alive"]
        pids = gateway.pids()
        gateway.signal(signal.SIGTERM)
        assert gateway.exit_code() == 0
        assert not any(alive(pid) for pid in pids)
        assert len(gateway.logged("reaped")) == 3


def test_connections_reach_every_slot(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, workers=3) as gateway:
        assert {gateway.ask()[0] for _ in range(100)} == {0, 1, 2}


def test_a_killed_worker_comes_back_on_its_slot(tmp_path: Path) -> None:
    """B11: same slot, same socket, its samples reaped at once. B15: no connection waiting to be accepted is reset."""
    with GatewayProcess(tmp_path) as gateway:
        victim = gateway.pids()[0]
        os.kill(victim, signal.SIGKILL)
        answers = [gateway.ask() for _ in range(50)]
        assert len(answers) == 50

        def back() -> dict[str, Any] | None:
            slot = gateway.slots()[0]
            return slot if slot["state"] == "ready" and slot["pid"] != victim else None

        replaced = eventually(back, "slot 0 is back")
        assert replaced["pid"] is not None
        assert replaced["restarts"] == 1
        eventually(lambda: gateway.logged("reaped"), "its samples are reaped")
        assert len(gateway.logged("reaped")) == 1
        assert eventually(lambda: gateway.ask() == (0, replaced["pid"]), "slot 0 answers again")


def test_new_connections_avoid_a_stopped_worker_that_is_then_killed_for_its_silence(tmp_path: Path) -> None:
    """B9: silence is what kills (scaled down to 2 s here)."""
    with GatewayProcess(tmp_path, hung_after_s=2.0) as gateway:
        victim = gateway.pids()[0]
        os.kill(victim, signal.SIGSTOP)
        eventually(lambda: gateway.logged("a worker hangs"), "the supervisor notices")
        eventually(lambda: not alive(victim), "it is killed")
        assert eventually(lambda: gateway.ask()[0] == 0, "slot 0 answers again")


def test_counters_do_not_fall_when_workers_die(tmp_path: Path) -> None:
    """E2"""
    with GatewayProcess(tmp_path) as gateway:
        for _ in range(40):
            gateway.ask()
        eventually(lambda: gateway.get("/status")["samples"]["begun"] == 40, "all are counted")
        for pid in gateway.pids():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: all(slot["state"] == "ready" and slot["restarts"] for slot in gateway.slots()), "both back")
        gateway.ask()
        eventually(lambda: gateway.get("/status")["samples"]["begun"] == 41, "the total goes on")


def test_workers_that_die_at_start_end_it(tmp_path: Path) -> None:
    """B10: exit code 4, after back-off."""
    with GatewayProcess(tmp_path, worker="dies", workers=1) as gateway:
        assert gateway.exit_code() == 4
        assert gateway.output == ""
        assert gateway.logged("the gateway stops")[0]["reason"] == "worker 0 died 5 times at start"


def test_a_worker_that_cannot_start_ends_it_with_its_words(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, worker="fails") as gateway:
        assert gateway.exit_code() == 3
        assert gateway.logged("the gateway stops")[0]["reason"] == "the upstream offers no model"


def test_drain_waits_for_what_runs(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, worker="drains-slowly", flags=("--drain-timeout", "5")) as gateway:
        pids = gateway.pids()
        gateway.signal(signal.SIGTERM)
        eventually(lambda: {slot["state"] for slot in gateway.slots()} == {"draining"}, "both drain")
        assert all(alive(pid) for pid in pids)
        assert gateway.exit_code() == 0


def test_with_the_embedded_redis_a_stop_waits_for_results_that_nobody_fetched_yet(tmp_path: Path) -> None:
    """...and not until the deadline (60 s), once all have been."""
    with GatewayProcess(tmp_path, worker="lingers") as gateway:
        eventually(lambda: {gateway.ask()[0] for _ in range(10)} == {0, 1}, "both have results")
        gateway.signal(signal.SIGTERM)
        eventually(lambda: {slot["state"] for slot in gateway.slots()} == {"draining"}, "both drain")
        assert gateway.exit_code() == 0
        assert not gateway.logged("results that nobody fetched")


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, worker="ignores-drain") as gateway:
        pids = gateway.pids()
        gateway.signal(signal.SIGINT)
        eventually(lambda: {slot["state"] for slot in gateway.slots()} == {"draining"}, "both drain")
        gateway.signal(signal.SIGINT)
        assert gateway.exit_code() == 0
        assert not any(alive(pid) for pid in pids)


def test_leftovers_are_killed_at_the_deadline(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, worker="ignores-drain", workers=1, flags=("--drain-timeout", "0")) as gateway:
        gateway.ready_line()
        gateway.signal(signal.SIGTERM)
        assert gateway.exit_code() == 0
        assert gateway.logged("a worker has ended")[0]["code"] == -signal.SIGKILL


def test_sighup_rolls_without_refusing_anybody(tmp_path: Path) -> None:
    """B15"""
    with GatewayProcess(tmp_path) as gateway:
        before = set(gateway.pids())
        gateway.signal(signal.SIGHUP)

        def rolled() -> bool:
            gateway.ask()  # raises when a connection is reset or refused
            return not before.intersection(gateway.pids()) and not any(alive(pid) for pid in before)

        eventually(rolled, "both workers are replaced")
        assert [slot["restarts"] for slot in gateway.slots()] == [1, 1]


def test_a_roll_keeps_the_old_worker_when_the_new_one_dies(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, worker="fails-second") as gateway:
        before = gateway.pids()
        assert gateway.post("/workers/0/restart") == {"restarting": 0}
        eventually(lambda: gateway.logged("the roll stops"), "the new one dies")
        assert gateway.pids() == before
        assert gateway.ask()[1] in before


def test_sighup_with_a_wrong_configuration_changes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("max-in-flight = 5\n")
    with GatewayProcess(tmp_path, flags=("--config", str(config))) as gateway:
        before = gateway.pids()
        config.write_text("max-in-flight = 0\n")
        gateway.signal(signal.SIGHUP)
        refusal = eventually(lambda: gateway.logged("the configuration is invalid now"), "it is refused")
        assert "max-in-flight: '0' is not allowed" in refusal[0]["reason"]
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            gateway.post("/reload")
        refused.value.close()
        assert gateway.pids() == before


def test_sighup_names_what_it_cannot_change(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("max-in-flight = 5\n")
    with GatewayProcess(tmp_path, workers=1, flags=("--config", str(config))) as gateway:
        gateway.pids()
        config.write_text("max-in-flight = 6\nbacklog = 7\nkey-prefix = 'other'\n")
        gateway.signal(signal.SIGHUP)
        warning = eventually(lambda: gateway.logged("some changes of the configuration"), "it is logged")
        assert warning[0]["unchanged"] == ["--backlog", "--key-prefix"]


def test_workers_exit_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """A20: nothing of a killed gateway stays, so that the next one can start."""
    with GatewayProcess(tmp_path) as gateway:
        pids = gateway.pids()
        gateway.signal(signal.SIGKILL)
        gateway.exit_code()
        eventually(lambda: not any(alive(pid) for pid in pids), "the workers are gone")


def test_sigusr1_logs_the_status(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, workers=1) as gateway:
        pid = gateway.pids()[0]
        gateway.signal(signal.SIGUSR1)
        logged = eventually(lambda: gateway.logged("status of a worker"), "it is logged")
        assert (logged[0]["slot"], logged[0]["pid"], logged[0]["state"]) == (0, pid, "ready")


@pytest.mark.parametrize("reuse", [False, True])
def test_a_taken_port_is_named(tmp_path: Path, reuse: bool) -> None:
    """B10: also when the other listener would let us in (SO_REUSEPORT)."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse))
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with GatewayProcess(tmp_path, flags=("--port", port)) as gateway:
            assert gateway.exit_code() == 3
            assert f"127.0.0.1:{port} is used by another process" in gateway.errors


def test_a_source_ip_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, flags=("--source-ips", "127.0.0.1,192.0.2.77")) as gateway:
        assert gateway.exit_code() == 3
        assert "--source-ips: 192.0.2.77 cannot be bound" in gateway.errors


def test_source_ips_go_round(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, workers=3, flags=("--source-ips", "127.0.0.2-127.0.0.3")) as gateway:
        assert [slot["source_ip"] for slot in gateway.slots()] == ["127.0.0.2", "127.0.0.3", "127.0.0.2"]


def test_ipv6(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, flags=("--host", "::1")) as gateway:
        assert "http://[::1]:" in gateway.ready_line()
        assert gateway.ask()[0] in (0, 1)


def test_a_run_dir_serves_one_gateway(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    run_dir = tmp_path / "run"
    with GatewayProcess(first, workers=1, flags=("--run-dir", str(run_dir))) as gateway:
        gateway.ready_line()
        assert (run_dir / "gateway.pid").read_text() == f"{gateway.popen.pid}\n"
        assert run_dir.stat().st_mode & 0o777 == 0o700
        with GatewayProcess(second, workers=1, flags=("--run-dir", str(run_dir))) as other:
            assert other.exit_code() == 3
            assert "is in use by another gateway" in other.errors


def test_a_wrong_flag_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """B10"""
    with GatewayProcess(tmp_path, flags=("--lease", "soon")) as gateway:
        assert gateway.exit_code() == 2
        assert gateway.errors.count("\n") == 1
        assert gateway.errors.startswith("gateway: --lease: 'soon' is not allowed; give seconds")


def test_the_admin_key_is_asked_for(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("op-key\n")
    with GatewayProcess(tmp_path, workers=1, flags=("--admin-key-file", str(key_file))) as gateway:
        assert gateway.get("/livez")["alive"]
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            gateway.get("/status")
        refused.value.close()
        for headers in ({"X-Admin-Key": "op-key"}, {"Authorization": "Bearer op-key"}):
            request = urllib.request.Request(gateway.admin_url + "/status", headers=headers)
            with urllib.request.urlopen(request) as reply:
                assert reply.status == 200


def test_restarting_a_slot_that_is_not_there_is_a_404(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, workers=1) as gateway:
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            gateway.post("/workers/7/restart")
        refused.value.close()


def test_the_spare_takes_the_place_of_a_killed_worker(tmp_path: Path) -> None:
    """B11: at once, on its socket. B15: what waits there is served by it."""
    with GatewayProcess(tmp_path, workers=1) as gateway:
        victim, spare = gateway.pids()[0], gateway.warm_spare()
        os.kill(victim, signal.SIGSTOP)  # from here on connections wait in the slot's queue
        with (
            socket.create_connection(gateway.public, timeout=DEADLINE_S) as first,
            socket.create_connection(gateway.public, timeout=DEADLINE_S) as second,
        ):
            os.kill(victim, signal.SIGKILL)
            expected = f"0 {spare}\n".encode()
            assert (first.recv(100), second.recv(100)) == (expected, expected)
        assert gateway.pids() == [spare]
        assert gateway.slots()[0]["restarts"] == 1
        assert gateway.warm_spare(but=spare) not in (victim, spare)


def test_the_spare_is_no_worker_to_anybody_who_counts_them(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        spare = gateway.warm_spare()
        status = gateway.get("/status")
        assert len(status["workers"]) == 2
        assert spare not in gateway.pids()
        assert gateway.get("/readyz")["ready"]
        assert {gateway.ask()[1] for _ in range(50)} == set(gateway.pids())


def test_workers_killed_in_quick_succession_all_come_back(tmp_path: Path) -> None:
    """The second finds no spare, and starts cold."""
    with GatewayProcess(tmp_path) as gateway:
        before, spare = gateway.pids(), gateway.warm_spare()
        for pid in (*before, spare):
            os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            slots = gateway.slots()
            pids = {slot["pid"] for slot in slots}
            return all(slot["state"] == "ready" for slot in slots) and pids.isdisjoint({*before, spare})

        eventually(back, "both are back")
        assert gateway.warm_spare(but=spare)


def spares_ended(gateway: GatewayProcess) -> int:
    return len(gateway.logged("the spare has ended"))


def test_a_spare_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        before, spare = gateway.pids(), gateway.warm_spare()
        os.kill(spare, signal.SIGKILL)
        assert gateway.warm_spare(but=spare) not in before
        assert gateway.pids() == before
        assert not gateway.logged("reaped")


def test_a_spare_that_keeps_dying_ends_nothing(tmp_path: Path) -> None:
    """B10: only a worker may be the reason for exit code 4; without a spare a slot starts cold."""
    with GatewayProcess(tmp_path, worker="spare-dies", workers=1) as gateway:
        eventually(lambda: spares_ended(gateway) >= 3, "three spares die")
        victim = gateway.pids()[0]
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: gateway.ask()[1] != victim, "the slot is back")
        gateway.signal(signal.SIGTERM)
        assert gateway.exit_code() == 0


def test_a_spare_that_falls_silent_is_replaced(tmp_path: Path) -> None:
    """B9"""
    with GatewayProcess(tmp_path, worker="spare-hangs", workers=1, hung_after_s=2.0) as gateway:
        silent = gateway.warm_spare()
        assert gateway.warm_spare(but=silent)
        eventually(lambda: not alive(silent), "the silent one is gone")


def test_a_roll_takes_the_spare_first(tmp_path: Path) -> None:
    """B15"""
    with GatewayProcess(tmp_path) as gateway:
        before, spare = gateway.pids(), gateway.warm_spare()
        gateway.post("/workers/1/restart")
        eventually(lambda: gateway.pids() == [before[0], spare], "the spare serves slot 1")
        eventually(lambda: not alive(before[1]), "the old one has drained")


def test_without_a_spare_a_slot_starts_cold(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, workers=1, flags=("--no-warm-spare",)) as gateway:
        victim = gateway.pids()[0]
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: gateway.ask()[1] != victim, "the slot is back")
        assert gateway.get("/status")["spare"] is None
        assert not gateway.logged("the spare becomes a worker")


def test_a_spare_ends_with_its_supervisor(tmp_path: Path) -> None:
    """A20: and while it lives, even stopped, it keeps no port taken."""
    with GatewayProcess(tmp_path, workers=1) as gateway:
        spare, public = gateway.warm_spare(), gateway.public
        worker = gateway.pids()[0]
        os.kill(spare, signal.SIGSTOP)
        gateway.signal(signal.SIGKILL)
        gateway.exit_code()
        eventually(lambda: not alive(worker), "the worker is gone")
        try:
            with socket.create_server(public):  # sets SO_REUSEADDR, which passes over no listener
                pass
        finally:
            os.kill(spare, signal.SIGCONT)
        eventually(lambda: not alive(spare), "the spare is gone")
