"""The common clock of ranks: lines through two readings, by hand; ranks of one machine as if they were on several."""

from __future__ import annotations

import pytest
from pipelines import Part, programs_of
from rank_pool import RankPool
from small_jobs import plain

from penstock.executor.run.clocks import CommonClock, Reading


def test_drift_is_spread_evenly_between_two_readings() -> None:
    clock = CommonClock(Reading(1000, -500, 7), Reading(2000, -480, 3))
    assert clock.common_ns([1000, 1500, 2000]) == [500, 1010, 1520]
    assert clock.error_ns == 7


def test_a_clock_that_does_not_drift_is_shifted() -> None:
    assert CommonClock(Reading(5, 0, 0), Reading(9, 0, 0)).common_ns([6, 7]) == [6, 7]
    assert CommonClock(Reading(5, 3, 1), Reading(5, 3, 1)).common_ns([6]) == [9]


def test_the_bound_holds_between_the_readings() -> None:
    """A clock that runs 50 ppm fast and starts 3 s ahead, read with errors up to the stated ones."""
    days = 10**13

    def true_ns(local_ns: int) -> int:
        return (local_ns - 3 * 10**9) * 1_000_000 // 1_000_050

    first, last = (Reading(at, true_ns(at) - at + wrong, 2000) for at, wrong in ((10**10, 2000), (days, -2000)))
    clock = CommonClock(first, last)
    times = [10**10 + k * (days - 10**10) // 100 for k in range(101)]
    apart = [abs(common - true_ns(at)) for at, common in zip(times, clock.common_ns(times), strict=True)]
    assert 0 < max(apart) <= clock.error_ns + 1


@pytest.mark.tier("nightly")
def test_ranks_as_if_on_other_hosts_are_within_their_stated_error(pool: RankPool) -> None:
    """Three ranks of one machine share a clock. Ranks that claim otherwise measure it, with a stated error."""
    programs = programs_of(plain, [Part(2, (0,)), Part(2, (1,)), Part(2, (2,))], 3)
    same, apart = [
        pool.train(programs, "plain", steps=3, trace_steps=2, check=False, host_of_rank=hosts)
        for hosts in (["a", "a", "a"], ["a", "b", "b"])
    ]
    errors = {}
    for name, results in (("same", same), ("apart", apart)):
        ranks = [[e["rank_trace"] for e in result["events"] if e["kind"] == "trace"] for result in results]
        assert [[one["step"] for one in traces] for traces in ranks] == [[1, 2]] * 3
        errors[name] = [traces[-1]["clock_error_ns"] for traces in ranks]
        for step in (0, 1):
            times = [{e["instruction"]: e for e in traces[step]["events"]} for traces in ranks]
            for s in (0, 1):
                slack = errors[name][s] + errors[name][s + 1]
                for m in range(3):
                    assert times[s][f"{s}SEND_F{m}"]["start_ns"] <= times[s + 1][f"{s + 1}F{m}"]["start_ns"] + slack
                    assert times[s + 1][f"{s + 1}SEND_B{m}"]["start_ns"] <= times[s][f"{s}B{m}"]["start_ns"] + slack
    assert errors["same"] == [0, 0, 0]
    assert errors["apart"][0] == 0 < min(errors["apart"][1:])
