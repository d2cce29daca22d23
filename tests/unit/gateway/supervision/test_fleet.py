from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.supervision import fleet as f
from gateway.supervision import fleet_model as a

PACE = a.USUAL_PACE
DRAIN_S = 10.0
ROLL_S = 100.0


def new_fleet(slots: int = 2, *, warm_spare: bool = False) -> f.Fleet:
    return f.Fleet(slots, PACE, drain_timeout_s=DRAIN_S, roll_deadline_s=ROLL_S, warm_spare=warm_spare)


def up(slots: int = 2, now: float = 0.0) -> f.Fleet:
    """All slots ready; serial n + 1 is in slot n."""
    fleet = new_fleet(slots)
    fleet.start(now)
    for serial in range(1, slots + 1):
        fleet.ready(serial, now)
    return fleet


def keep_alive(fleet: f.Fleet, serials: list[int], since: float, until: float) -> None:
    """Status and tick once a second, as in life."""
    now = since
    while now <= until:
        for serial in serials:
            fleet.heard(serial, now)
        assert fleet.tick(now) == []
        now += 1


def kinds(actions: list[a.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


class TestStart:
    def test_spawns_every_slot(self) -> None:
        assert new_fleet(3).start(0.0) == [a.Spawn(0, 1), a.Spawn(1, 2), a.Spawn(2, 3)]

    def test_announces_once_when_all_are_ready(self) -> None:
        fleet = new_fleet(2)
        fleet.start(0.0)
        assert fleet.ready(2, 0.1) == [a.Steer((1,))]
        assert fleet.ready(1, 0.2) == [a.Steer((0, 1)), a.Announce()]
        fleet.exited(1, 1.0)
        assert a.Announce() not in fleet.ready(3, 1.5)

    def test_a_worker_that_cannot_start_halts_with_its_words(self) -> None:
        fleet = new_fleet(2)
        fleet.start(0.0)
        assert fleet.failed(1, "no model", 0.1) == [a.Kill(1), a.Kill(2)]
        assert fleet.exited(1, 0.2) == [a.Steer(())]
        assert fleet.exited(2, 0.3) == [a.Halt(3, "no model")]

    def test_dying_before_ready_halts_after_some_attempts(self) -> None:
        """B10: no hot restart loop."""
        fleet = new_fleet(1)
        fleet.start(0.0)
        now, delays, serial = 0.0, [], 1
        while not fleet.halting:
            actions = fleet.exited(serial, now)
            if "Spawn" not in kinds(actions) and not fleet.halting:
                due = fleet.slots[0].spawn_at
                assert due is not None
                delays.append(due - now)
                now = due
                actions = fleet.tick(now)
            serial += 1
        assert delays == [0.5, 1.0, 2.0]
        assert serial - 1 == f.START_ATTEMPTS
        assert actions[-1] == a.Halt(4, "worker 0 died 5 times at start")

    def test_one_that_never_gets_ready_is_killed(self) -> None:
        fleet = new_fleet(1)
        fleet.start(0.0)
        for now in range(int(f.START_TIMEOUT_S)):
            assert fleet.tick(float(now)) == []
        assert a.Abort(1) in fleet.tick(f.START_TIMEOUT_S)

    def test_once_announced_dying_at_start_never_halts(self) -> None:
        fleet = up(2)
        serial, now = 1, 0.0
        for _ in range(20):
            fleet.exited(serial, now)
            now = max(now, fleet.slots[0].spawn_at or 0.0)
            fleet.heard(2, now)
            fleet.tick(now)
            current = fleet.slots[0].current
            assert current is not None
            serial = current.serial
        assert not fleet.halting


class TestDeath:
    def test_is_steered_away_from_and_respawned_at_once(self) -> None:
        """B11"""
        fleet = up(2)
        assert fleet.exited(1, 5.0) == [a.Spawn(0, 3), a.Steer((1,))]
        assert fleet.ready(3, 5.6) == [a.Steer((0, 1))]
        assert fleet.slots[0].restarts == 1

    @pytest.mark.parametrize(
        ("deaths", "delay_s"), [(1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (8, 30.0), (9, 30.0), (10_000, 30.0)]
    )
    def test_back_off(self, deaths: int, delay_s: float) -> None:
        assert f.restart_delay_s(deaths) == delay_s

    def test_back_off_starts_anew_after_a_healthy_minute(self) -> None:
        fleet = up(1)
        fleet.exited(1, 1.0)
        fleet.ready(2, 2.0)
        assert kinds(fleet.exited(2, 61.9)) == ["Note", "Steer"]
        fleet.tick(62.4)
        fleet.ready(3, 63.0)
        assert fleet.exited(3, 123.0)[0] == a.Spawn(0, 4)

    def test_the_spawn_comes_when_it_is_due_and_not_before(self) -> None:
        fleet = up(1)
        fleet.exited(1, 1.0)
        fleet.exited(2, 2.0)
        assert fleet.slots[0].state == "backing off"
        assert fleet.tick(2.4) == []
        assert fleet.tick(2.5) == [a.Spawn(0, 3)]

    def test_an_unknown_serial_changes_nothing(self) -> None:
        fleet = up(1)
        for actions in (fleet.exited(99, 1.0), fleet.ready(99, 1.0), fleet.heard(99, 1.0), fleet.failed(99, "x", 1.0)):
            assert actions == []
        assert fleet.slots[0].serves


class TestSilence:
    def test_a_hung_worker_is_aborted_then_killed(self) -> None:
        """B9"""
        fleet = up(2)
        keep_alive(fleet, [2], 0.0, PACE.hung_after_s - 1)
        fleet.heard(2, 8.0)
        note, *rest = fleet.tick(8.0)
        assert note == a.Note("a worker hangs and is killed", 0, "silent for 8.0 s")
        assert rest == [a.Steer((1,)), a.Abort(1)]
        fleet.heard(2, 8.5)
        assert fleet.tick(8.5) == []
        assert fleet.tick(9.0) == [a.Kill(1)]
        assert fleet.tick(9.2) == []
        assert fleet.exited(1, 9.3) == [a.Spawn(0, 3)]

    def test_one_that_reports_lives(self) -> None:
        keep_alive(up(2), [1, 2], 0.0, 100.0)

    def test_a_supervisor_that_was_stopped_blames_nobody(self) -> None:
        fleet = up(2)
        fleet.tick(0.5)
        assert fleet.tick(100.0) == []
        keep_alive(fleet, [], 101.0, 106.0)
        assert a.Abort(1) in fleet.tick(107.0)

    def test_a_draining_worker_must_report_too(self) -> None:
        fleet = up(1)
        fleet.terminate(0.0)
        keep_alive(fleet, [], 0.0, 7.0)
        assert a.Abort(1) in fleet.tick(8.0)


class TestTerminate:
    def test_drains_all_and_halts_when_the_last_is_gone(self) -> None:
        fleet = up(2)
        assert fleet.terminate(5.0) == [a.SendDrain(1, DRAIN_S), a.SendDrain(2, DRAIN_S)]
        assert fleet.exited(1, 6.0) == [a.Steer(())]
        assert fleet.exited(2, 7.0) == [a.Halt(0)]

    def test_leftovers_are_killed_a_little_after_the_deadline(self) -> None:
        fleet = up(1)
        fleet.terminate(0.0)
        keep_alive(fleet, [1], 0.0, DRAIN_S + PACE.drain_grace_s - 1)
        assert fleet.tick(DRAIN_S + PACE.drain_grace_s) == [a.Kill(1)]
        assert fleet.exited(1, 31.0)[-1] == a.Halt(0)

    def test_a_second_time_kills_at_once(self) -> None:
        fleet = up(2)
        fleet.terminate(0.0)
        assert fleet.terminate(0.1) == [a.Kill(1), a.Kill(2)]
        fleet.exited(1, 0.2)
        assert fleet.exited(2, 0.2)[-1] == a.Halt(0)

    def test_a_starting_worker_is_not_waited_for(self) -> None:
        fleet = new_fleet(1)
        fleet.start(0.0)
        assert fleet.terminate(0.1) == [a.Kill(1)]

    def test_a_slot_that_backs_off_is_not_spawned_again(self) -> None:
        fleet = up(1)
        fleet.exited(1, 1.0)
        fleet.exited(2, 1.1)
        assert fleet.terminate(1.2) == [a.Halt(0)]
        assert "Spawn" not in kinds(fleet.tick(60.0))

    def test_a_death_while_draining_is_not_replaced(self) -> None:
        fleet = up(2)
        fleet.terminate(0.0)
        assert "Spawn" not in kinds(fleet.exited(1, 1.0))


class TestRoll:
    def test_goes_one_slot_at_a_time_and_never_leaves_a_slot_unserved(self) -> None:
        """B15: the new worker serves the slot before the old one drains."""
        fleet = up(2)
        assert fleet.roll(10.0) == [a.Spawn(0, 3)]
        assert fleet.slots[0].serves
        assert fleet.ready(3, 11.0) == [a.SendDrain(1, ROLL_S, True), a.Spawn(1, 4)]
        assert fleet.ready(4, 12.0) == [a.SendDrain(2, ROLL_S, True)]
        assert fleet.exited(1, 13.0) == []
        assert fleet.exited(2, 14.0) == []
        assert [slot.restarts for slot in fleet.slots] == [1, 1]

    def test_is_given_up_when_the_new_worker_dies(self) -> None:
        fleet = up(2)
        fleet.roll(10.0)
        actions = fleet.exited(3, 11.0)
        assert kinds(actions) == ["Note"]
        assert fleet.slots[0].serves

    def test_survives_the_death_of_the_old_worker(self) -> None:
        fleet = up(1)
        fleet.roll(10.0)
        assert fleet.exited(1, 10.5) == [a.Steer(())]
        assert fleet.ready(2, 11.0) == [a.Steer((0,))]

    def test_waits_for_a_slot_that_is_starting(self) -> None:
        fleet = up(1)
        fleet.exited(1, 1.0)
        assert fleet.roll(1.1) == []
        assert fleet.ready(2, 1.5) == [a.Steer((0,)), a.Spawn(0, 3)]

    def test_a_replaced_worker_that_overstays_is_killed(self) -> None:
        fleet = up(1)
        fleet.roll(0.0)
        fleet.ready(2, 0.0)
        keep_alive(fleet, [1, 2], 0.0, ROLL_S + PACE.drain_grace_s - 1)
        fleet.heard(2, ROLL_S + PACE.drain_grace_s)
        assert fleet.tick(ROLL_S + PACE.drain_grace_s) == [a.Kill(1)]

    def test_of_one_slot(self) -> None:
        fleet = up(3)
        assert fleet.restart(1, 0.0) == [a.Spawn(1, 4)]
        assert fleet.ready(4, 1.0) == [a.SendDrain(2, ROLL_S, True)]

    def test_terminate_ends_it(self) -> None:
        fleet = up(2)
        fleet.roll(0.0)
        assert fleet.terminate(0.5) == [a.SendDrain(1, DRAIN_S), a.Kill(3), a.SendDrain(2, DRAIN_S)]
        assert fleet.exited(3, 0.6) == [a.Steer(())]

    def test_replaced_workers_still_draining_get_the_shorter_deadline(self) -> None:
        fleet = up(1)
        fleet.roll(0.0)
        fleet.ready(2, 1.0)
        assert fleet.terminate(2.0) == [a.SendDrain(2, DRAIN_S), a.SendDrain(1, DRAIN_S)]


def with_spare(slots: int = 2, now: float = 0.0) -> tuple[f.Fleet, int]:
    """All slots ready, and a warm spare; its serial."""
    fleet = new_fleet(slots, warm_spare=True)
    fleet.start(now)
    for serial in range(1, slots + 1):
        fleet.ready(serial, now)
    assert fleet.tick(now) == [a.SpawnSpare(slots + 1)]
    fleet.warm(slots + 1, now)
    return fleet, slots + 1


class TestSpare:
    def test_is_spawned_when_all_are_ready_and_not_before(self) -> None:
        fleet = new_fleet(2, warm_spare=True)
        fleet.start(0.0)
        fleet.ready(1, 1.0)
        assert fleet.tick(1.2) == []
        fleet.ready(2, 2.0)
        assert fleet.tick(2.2) == [a.SpawnSpare(3)]
        assert fleet.tick(2.4) == []

    def test_takes_the_place_of_a_dead_worker_and_is_replaced_once_it_serves(self) -> None:
        """B11"""
        fleet, spare = with_spare()
        assert fleet.exited(1, 5.0) == [a.Promote(0, spare), a.Steer((1,))]
        assert fleet.slots[0].state == "starting"
        assert fleet.spare is None
        assert fleet.tick(5.2) == []
        assert fleet.ready(spare, 5.3) == [a.Steer((0, 1))]
        assert fleet.tick(5.4) == [a.SpawnSpare(4)]
        assert fleet.slots[0].restarts == 1

    def test_that_is_not_warm_yet_is_no_help(self) -> None:
        fleet = new_fleet(1, warm_spare=True)
        fleet.start(0.0)
        fleet.ready(1, 0.0)
        fleet.tick(0.0)
        assert fleet.exited(1, 0.5)[0] == a.Spawn(0, 3)

    def test_of_two_deaths_the_second_starts_cold(self) -> None:
        fleet, spare = with_spare()
        assert fleet.exited(1, 5.0)[0] == a.Promote(0, spare)
        assert fleet.exited(2, 5.0)[0] == a.Spawn(1, 4)

    def test_waits_for_the_back_off_of_a_slot_like_any_other(self) -> None:
        fleet, spare = with_spare(1)
        fleet.exited(1, 1.0)
        fleet.ready(spare, 1.1)
        assert fleet.tick(1.2) == [a.SpawnSpare(3)]
        fleet.warm(3, 1.3)
        assert kinds(fleet.exited(spare, 1.4)) == ["Note", "Steer"]
        assert fleet.tick(1.8) == []
        assert fleet.tick(1.9) == [a.Promote(0, 3)]

    def test_that_was_dead_when_it_was_promoted_costs_the_slot_nothing(self) -> None:
        fleet, spare = with_spare(1)
        fleet.exited(1, 5.0)
        assert fleet.exited(spare, 5.0) == [a.Spawn(0, 3)]
        assert fleet.slots[0].deaths == 1

    def test_that_dies_is_replaced_with_back_off(self) -> None:
        fleet, spare = with_spare(1)
        now = 1.0
        spawned: list[float] = []
        for _ in range(6):
            assert fleet.exited(spare, now) == []
            assert fleet.spare is None
            while fleet.spare is None:
                now += 0.25
                fleet.heard(1, now)
                fleet.tick(now)
            spare = fleet.spare.serial
            spawned.append(now)
        assert [later - earlier for earlier, later in pairwise(spawned)] == [0.5, 1.0, 2.0, 4.0, 8.0]

    def test_that_was_warm_for_long_begins_its_back_off_anew(self) -> None:
        fleet, spare = with_spare(1)
        fleet.exited(spare, 1.0)
        assert fleet.tick(1.0) == [a.SpawnSpare(3)]
        fleet.warm(3, 2.0)
        fleet.exited(3, 62.0)
        fleet.heard(1, 62.0)
        assert fleet.tick(62.0) == [a.SpawnSpare(4)]

    def test_that_keeps_dying_never_halts_the_fleet(self) -> None:
        """B10: exit code 4 is for workers."""
        fleet, spare = with_spare(1)
        for now in range(0, 1000):
            fleet.exited(spare, float(now))
            fleet.heard(1, float(now))
            fleet.tick(float(now))
            spare = fleet.spare.serial if fleet.spare is not None else -1
        assert not fleet.halting
        assert fleet.slots[0].serves

    def test_that_falls_silent_is_killed(self) -> None:
        """B9"""
        fleet, spare = with_spare(1)
        keep_alive(fleet, [1], 0.0, PACE.hung_after_s - 1)
        fleet.heard(1, PACE.hung_after_s)
        assert fleet.tick(PACE.hung_after_s) == [
            a.Note("a worker hangs and is killed", None, "silent for 8.0 s"),
            a.Abort(spare),
        ]
        assert fleet.exited(1, PACE.hung_after_s)[0] == a.Spawn(0, 3)
        assert a.Kill(spare) in fleet.tick(PACE.hung_after_s + f.ABORT_GRACE_S)

    def test_that_says_it_is_warm_lives(self) -> None:
        fleet, spare = with_spare(1)
        for now in range(60):
            fleet.heard(1, float(now))
            fleet.warm(spare, float(now))
            assert fleet.tick(float(now)) == []

    def test_may_import_for_minutes(self) -> None:
        fleet = up(1)
        fleet.warm_spare = True
        assert fleet.tick(0.0) == [a.SpawnSpare(2)]
        keep_alive(fleet, [1], 0.0, f.IMPORT_TIMEOUT_S - 1)
        fleet.heard(1, f.IMPORT_TIMEOUT_S)
        assert a.Abort(2) in fleet.tick(f.IMPORT_TIMEOUT_S)

    def test_is_used_by_a_roll_and_replaced_after_it(self) -> None:
        """B15"""
        fleet, spare = with_spare()
        assert fleet.roll(10.0) == [a.Promote(0, spare)]
        assert fleet.slots[0].serves
        assert fleet.ready(spare, 10.1) == [a.SendDrain(1, ROLL_S, True), a.Spawn(1, 4)]
        assert fleet.tick(10.2) == []
        fleet.ready(4, 11.0)
        assert fleet.tick(11.2) == [a.SpawnSpare(5)]

    def test_that_was_dead_when_a_roll_took_it_does_not_end_the_roll(self) -> None:
        fleet, spare = with_spare(1)
        assert fleet.restart(0, 10.0) == [a.Promote(0, spare)]
        assert fleet.exited(spare, 10.0) == [a.Spawn(0, 3)]
        assert fleet.ready(3, 11.0) == [a.SendDrain(1, ROLL_S, True)]

    def test_is_killed_when_the_gateway_stops(self) -> None:
        fleet, spare = with_spare(1)
        assert fleet.terminate(1.0) == [a.SendDrain(1, DRAIN_S), a.Kill(spare)]
        assert fleet.exited(spare, 1.1) == []
        assert fleet.tick(1.2) == []
        assert fleet.exited(1, 1.3) == [a.Steer(()), a.Halt(0)]

    def test_is_waited_for_by_the_end(self) -> None:
        fleet, spare = with_spare(1)
        fleet.terminate(1.0)
        assert fleet.exited(1, 1.1) == [a.Steer(())]
        assert fleet.exited(spare, 1.2) == [a.Halt(0)]

    def test_is_let_go_when_it_is_not_wanted_any_more(self) -> None:
        fleet, spare = with_spare(1)
        fleet.warm_spare = False
        assert fleet.tick(0.5) == [a.Kill(spare)]
        assert fleet.tick(0.6) == []
        fleet.exited(spare, 0.7)
        assert fleet.tick(1.7) == []
