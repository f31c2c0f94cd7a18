"""An audit of random requests: planners' claims are compared with every plan that any planner has.

Each seed is a request (``tests/solvers/audit/random_requests.py``): up to eight layers on up to eight devices, one in
four small enough that plans of all kinds are listed. Every planner runs. Its plans have to verify, its bounds and
sentences to be true of all plans, ``optimal`` to be unbeaten, and where something is ``infeasible`` there has to be no
plan (``tests/solvers/audit/claims.py``). Prints a table of counts, then each contradiction with the command that
reproduces it. The exit status is 1 if there is a contradiction. One process; ``--first`` continues a long audit.

    python benchmarks/audit_requests.py --first 0 --number 2000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / each) for each in ("src", "tests/solvers", "tests/solvers/audit")]

from claims import Contradiction, Effort, Tally, audit  # noqa: E402

from penstock.solvers.planners.catalogue import PLANNERS  # noqa: E402
from penstock.solvers.solve.warm import warm  # noqa: E402

TOLD_EVERY = 50
SHOWN = 3
"""Limit on the contradictions of one check by one planner that are written out; further ones are counted."""


def main() -> None:
    """Audit a range of seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--number", type=int, default=2000, help="seeds from it on")
    parser.add_argument("--max-plans", type=int, default=Effort().max_plans, help="plans that each planner may judge")
    parser.add_argument("--listed", type=int, default=Effort().listed, help="plans that are listed of a small request")
    parser.add_argument("--planner", action="append", choices=list(PLANNERS), help="one; may be repeated")
    parser.add_argument("--all", action="store_true", help="write every contradiction out")
    arguments = parser.parse_args()
    effort = Effort(arguments.max_plans, arguments.listed, Effort().orders, tuple(arguments.planner or PLANNERS))
    warm()
    total, started = Tally(), time.process_time()
    for seed in range(arguments.first, arguments.first + arguments.number):
        total.add(audit(seed, effort))
        if total.requests % TOLD_EVERY == 0:
            spent = time.process_time() - started
            print(
                f"{total.requests} requests, {len(total.contradictions)} contradictions, {spent:.0f} s; "
                f"goes on with --first {seed + 1}",
                file=sys.stderr,
                flush=True,
            )
    _print_sums(total, time.process_time() - started)
    _print_statuses(total)
    _print_contradictions(total.contradictions, effort, None if arguments.all else SHOWN)
    sys.exit(1 if total.contradictions else 0)


def _print_sums(total: Tally, seconds: float) -> None:
    by_check = Counter(each.check for each in total.contradictions)
    print("| what | number |\n|---|---|")
    for name, number in (
        ("requests", total.requests),
        ("small ones, with a list of plans", total.small),
        ("plans", total.plans),
        ("of these listed", total.listed),
        ("lists as good as all planners", f"{total.matched} of {total.rivalled}"),
        ("bounds", total.bounds),
        ("sentences", total.sentences),
        ("comparisons", total.comparisons),
        ("comparisons left open, as rounds do not repeat", total.unsettled),
        ("contradictions", len(total.contradictions)),
        *((f"of these: {check}", number) for check, number in sorted(by_check.items())),
        ("seconds of CPU", f"{seconds:.0f}"),
    ):
        print(f"| {name} | {number} |")
    for title, counter in (("plans of a kind", total.kinds), ("bounds by method", total.methods)):
        print(f"\n{title}: " + ", ".join(f"{name} {number}" for name, number in counter.most_common()))


def _print_statuses(total: Tally) -> None:
    seen = sorted({status for _planner, status in total.statuses})
    print(f"\n| planner | {' | '.join(seen)} |\n|---|{'---|' * len(seen)}")
    for planner in PLANNERS:
        print(f"| {planner} | {' | '.join(str(total.statuses[planner, status]) for status in seen)} |")


def _print_contradictions(contradictions: list[Contradiction], effort: Effort, most: int | None) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for each in contradictions:
        counts[each.check, each.planner] += 1
        if most is not None and counts[each.check, each.planner] > most:
            continue
        print(f"\n{each.check} ({each.planner}), seed {each.seed}: {each.detail}")
        print(
            f"  again: python benchmarks/audit_requests.py --first {each.seed} --number 1 "
            f"--max-plans {effort.max_plans} --listed {effort.listed} --all"
        )
    if contradictions:
        print(
            "\ncontradictions by check and planner: "
            + ", ".join(f"{c} {p} {n}" for (c, p), n in sorted(counts.items()))
        )


if __name__ == "__main__":
    main()
