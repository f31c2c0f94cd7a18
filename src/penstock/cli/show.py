"""Output of the commands: plans, results and comparisons as text that fits the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.planning.bound_sentences import bound_sentences
from penstock.planning.sentences import recomputed_modules
from penstock.schemas.amounts import amount, duration, percent
from penstock.schemas.api.words import choice_words, chosen_words

if TYPE_CHECKING:
    from penstock.planning.judge import Judgement
    from penstock.report.blocks import Table as Rows
    from penstock.schemas.api.jobs import PlanComparison, ResultOut
    from penstock.schemas.plan import Plan
    from penstock.schemas.request import PlanRequest

MORE = "every stage, every bound, the timeline and what was tried: --verbose"
PLAIN_WIDTH = 110
MAX_ROWS = 40
"""The number of rows of a table that fit a terminal."""


PROGRESS_S = 4.0
"""Seconds between two lines of progress that do not go to a terminal."""


@dataclass
class Screen:
    """The output of a command: answers go to standard output unless quiet, progress goes to standard error.

    ``live``: standard error is a terminal, on which one line of progress is replaced by the next.
    """

    out: Console
    quiet: bool
    live: bool
    _open: bool = False
    _started: float = field(default_factory=lambda: monotonic())
    _last_line: float = 0.0
    """Seconds after the start."""
    _text: str = ""
    _kernels: str | None = None
    _waited: bool = False
    """Whether a kernel has been waited for."""

    @classmethod
    def of(cls, *, quiet: bool = False, file: TextIO | None = None) -> Screen:
        """Return the usual screen. ``NO_COLOR`` and a pipe turn colours off."""
        width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
        console = Console(file=file or sys.stdout, width=max(width, 60), highlight=False, soft_wrap=True)
        return cls(console, quiet, sys.stderr.isatty())

    @property
    def colour(self) -> bool:
        """Whether colours are shown."""
        return self.out.is_terminal and not self.out.no_color and os.environ.get("TERM") != "dumb"

    def say(self, text: str = "") -> None:
        """Print a line of the answer."""
        if not self.quiet:
            self.out.print(Text.from_ansi(text))

    def table(self, table: Table) -> None:
        """Print a table of the answer."""
        if not self.quiet:
            self.out.print(table, soft_wrap=False)

    def page(
        self, heads: Sequence[str], rows: Iterable[Sequence[str]], *, whole: Sequence[str], more: bool, limit: int
    ) -> None:
        """Show one page of a service's list, with the columns of ``whole`` in one line each; ``more``: pages follow."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for head in heads:
            table.add_column(head, overflow="fold", no_wrap=head in whole)
        for row in rows:
            table.add_row(*row)
        self.table(table)
        if more:
            self.say(f"there are more; --limit shows up to 500 (now {limit})")

    def names(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show names, each in one line with what it stands for."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.table(table)

    def announce(self, text: str) -> None:
        """Show at once what takes a while before there is progress, such as loading PyTorch."""
        self._text = text
        self._show(at_once=True)

    def progress(self, text: str) -> None:
        """Show the elapsed time and the current work: at every call on a terminal, elsewhere every few seconds."""
        self._text = text
        self._show()

    def compiling(self, kernels: str | None) -> None:
        """Show the kernels that the search waits for in the line of progress, the first at once; None ends the wait."""
        self._kernels = kernels
        if kernels is not None:
            self._show(at_once=not self._waited)
            self._waited = True
        elif self.live:
            self._show()

    def _show(self, *, at_once: bool = False) -> None:
        passed = monotonic() - self._started
        compiling = "" if self._kernels is None else f"compiling {self._kernels}"
        line = f"{passed:.1f} s: " + "; ".join(filter(None, (compiling, self._text)))
        if self.live:
            print(f"\r\x1b[2K{line[: self.out.width - 1]}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif at_once or passed - self._last_line >= PROGRESS_S:
            self._last_line = passed
            print(f"penstock: {line}", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Remove the line of progress."""
        if self._open:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._open = False


def show_short(screen: Screen, request: PlanRequest, result: ResultOut, path: str | None, *, simulate: bool) -> None:
    """Show an answer in twelve lines at most: the layout, its speed, what is proven, the stages, who can express it.

    ``path``: the plan's file. ``simulate``: whether there is time to simulate the plan again, for its exports.
    """
    if (plan := _plan_to_show(screen, result)) is None:
        return
    from penstock.planning.headline import headline, proof, speed
    from penstock.planning.sentences import used
    from penstock.report.plan_tables import stages_in_short
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.topology import ClusterTopology

    profile, topology = request.profile, request.topology
    assert isinstance(profile, ModelProfile)
    assert isinstance(topology, ClusterTopology)
    idle = used(plan, topology).partition("; ")[2]
    title = f"{profile.name} on {topology.name}, {request.global_batch_size:,} samples a step"
    screen.say(f"{title}; {idle}" if idle else title)
    screen.say(headline(plan))
    screen.say(speed(plan))
    screen.say(proof(plan))
    screen.table(rich_table(stages_in_short(plan, profile), is_plain=True))
    if simulate:
        screen.say(_expressible(request, plan, path or "PLAN"))
    screen.say(f"{f'written to {path}; ' if path else ''}{MORE}")


def _expressible(request: PlanRequest, plan: Plan, path: str) -> str:
    """Return the trainers that can express a plan in one line, or why the first one cannot."""
    from penstock.exporting.layouts import expressible
    from penstock.planning.judge import judge
    from penstock.schemas.plan import PlanFile

    file = PlanFile(plan=plan, request=request)
    reasons = expressible(file, judge(file))
    can = [name for name, reason in reasons.items() if not reason]
    cannot = [(name, reason) for name, reason in reasons.items() if reason]
    if can:
        others = f"; not {', '.join(name for name, _reason in cannot)}" if cannot else ""
        return f"as flags: penstock export {path} --to {'|'.join(can)}{others}"
    line = f"as flags: for no trainer; {cannot[0][0]}: {cannot[0][1]}"
    return line if len(line) <= 100 else f"{line[:99]}…"


def _plan_to_show(screen: Screen, result: ResultOut) -> Plan | None:
    """End the line of progress and return the plan to show; without one, say the reason."""
    screen.done()
    if result.plan is None:
        _show_nothing(screen, result)
    return None if screen.quiet else result.plan


def show_result(screen: Screen, request: PlanRequest, result: ResultOut) -> None:
    """Show a planner's answer: the plan with its bound and timeline, or why it found no plan."""
    if (plan := _plan_to_show(screen, result)) is None:
        return
    from penstock.planning.judge import judge
    from penstock.schemas.plan import PlanFile

    judgement = judge(PlanFile(plan=plan, request=request))
    show_plan(screen, request, judgement)
    _say_why(screen, result)


def show_answer(screen: Screen, request: PlanRequest, result: ResultOut) -> None:
    """Show a service's answer as ``show_result`` does, but without the timeline, which takes a simulation."""
    if (plan := _plan_to_show(screen, result)) is None:
        return
    show_stages(screen, request, plan)
    _say_why(screen, result)


def _say_why(screen: Screen, result: ResultOut) -> None:
    """Show how the search ended, what it proved and which planners it skipped, one sentence per line."""
    screen.say(f"{result.status} after {result.seconds:.2f} s: " + "\n  ".join(result.why))


def _show_nothing(screen: Screen, result: ResultOut) -> None:
    screen.say(f"{result.status}: {result.sentence}")
    if result.infeasibility is not None:
        if result.infeasibility.sentence != result.sentence:
            screen.say(f"  {result.infeasibility.sentence}")
        if result.infeasibility.remedy:
            screen.say(f"  try: {result.infeasibility.remedy}")


def rich_table(rows: Rows, most: int = MAX_ROWS, *, is_plain: bool = False) -> Table:
    """Return rows as a table of the terminal; more than ``most`` rows are cut to the first and the last ones.

    ``is_plain``: without rules, and each row in one line.
    """
    table = Table(box=None if is_plain else SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if is_plain else 1, 0, 0))
    brief = rows.brief()
    for column in brief.columns:
        table.add_column(
            column.head,
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric or is_plain,
            overflow="fold",
        )
    texts = [[cell.text for cell in row] for row in brief.rows]
    half, left_out = most // 2, rows.total - most
    for row in texts if left_out <= 0 else texts[:half]:
        table.add_row(*row)
    if left_out > 0:
        table.add_row("…", f"{left_out:,} more")
        for row in texts[-half:]:
            table.add_row(*row)
    return table


def show_alternatives(screen: Screen, result: ResultOut) -> None:
    """Show a row for each choice of degrees that was compared, the best one first."""
    from penstock.report.plan_tables import alternatives_table

    if not result.alternatives:
        screen.say("no degrees were compared: the request leaves none open (--tensor auto)")
        return
    screen.table(rich_table(alternatives_table(result.alternatives), len(result.alternatives)))


def show_plan(screen: Screen, request: PlanRequest, judgement: Judgement) -> None:
    """Show stages, prediction, bounds and timeline."""
    from penstock.report.drawing.timeline_text import render_timeline

    show_stages(screen, request, judgement.plan)
    if judgement.timeline is not None:
        screen.say()
        width = screen.out.width - 1
        screen.say(
            render_timeline(
                judgement.problem, judgement.timeline, judgement.allocation, width=width, colour=screen.colour
            )
        )


def show_stages(screen: Screen, request: PlanRequest, plan: Plan) -> None:
    """Show stages, prediction and bounds."""
    from penstock.planning.sentences import used
    from penstock.report.plan_tables import stages_table
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.topology import ClusterTopology
    from penstock.solvers.model.plan_shape import micro_batches

    assert isinstance(request.profile, ModelProfile)
    assert isinstance(request.topology, ClusterTopology)
    screen.say(f"{request.profile.name} on {request.topology.name}: {plan.planner}, {plan.schedule.name} schedule")
    screen.say(used(plan, request.topology))
    batches = micro_batches(plan.num_micro_batches, plan.micro_batch_size)
    screen.say(f"global batch {plan.global_batch_size} in {batches}")
    screen.table(rich_table(stages_table(plan, request.profile, most=None)))
    for line in prediction_lines(plan):
        screen.say(line)


def prediction_lines(plan: Plan) -> list[str]:
    """Return lines with the simulated time and its expected error, the costs, and the proven bounds."""
    p = plan.prediction
    if p is None:
        return ["this plan has not been judged"]
    total = p.time_per_global_batch_ns
    lines = [
        f"predicted  {duration(total)} per global batch ± {percent(p.expected_error)} ({p.basis} costs), "
        f"{plan.global_batch_size / total * 1e9:,.1f} samples/s, bubble {percent(p.bubble)}, "
        f"peak memory {amount(p.peak_memory_bytes)}"
    ]
    if plan.degrees is not None:
        shared = [] if plan.sharding is None else [f"sharding {plan.sharding}"]
        lines.append(f"degrees    {', '.join([str(plan.degrees), *shared, *chosen_words(plan.chosen)])}")
    if (modules := recomputed_modules(plan)) is not None:
        lines.append(f"recompute  {modules}")
    if p.tokens_per_s_per_gpu is not None:
        mfu = "" if p.model_flops_utilisation is None else f", MFU {percent(p.model_flops_utilisation)}"
        lines.append(f"pace       {p.tokens_per_s_per_gpu:,.0f} tokens/s per GPU{mfu}")
    if (versions := max(use.memory.versions_bytes for use in p.devices)) > 0:
        lines.append(
            f"versions   {plan.update_rule} updates keep up to {amount(versions)} of other weights on a device"
        )
    if p.cost_per_sample is not None:
        lines.append(f"cost       {p.cost_per_sample:.3g} per sample")
    gaps = [f"gap {percent(c.gap)}: " for c in plan.certificates]
    for gap, sentence in zip_longest(gaps, bound_sentences(plan), fillvalue=""):
        lines.append(f"bound      {gap}{sentence}")
    return lines


def show_comparison(screen: Screen, rows: Sequence[PlanComparison]) -> None:
    """Show a row per planner and schedule, the best one first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    candidates = [row for row in rows if row.status != "unsupported"]
    several = {row.update_rule for row in candidates} - {None, "synchronous"}
    divided = any(row.degrees is not None for row in candidates)
    for head in ("planner", *(["degrees"] if divided else []), "schedule", *(["rule"] if several else []), "status"):
        table.add_column(head, no_wrap=head != "rule", min_width=10 if head == "rule" else None)
    for head in ("time", "speed-up", "gap", "memory", "took"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in sorted(candidates, key=lambda row: (row.iteration_ns is None, row.iteration_ns or 0)):
        table.add_row(
            row.planner,
            *([choice_words(row)] if divided else []),
            row.schedule or "–",
            *([(row.update_rule or "–").replace("_", " ")] if several else []),
            row.status,
            duration(row.iteration_ns) if row.iteration_ns is not None else "–",
            f"{row.speedup_vs_one_device:.2f}×" if row.speedup_vs_one_device is not None else "–",
            percent(row.gap) if row.gap is not None else "–",
            amount(row.peak_memory_bytes) if row.peak_memory_bytes is not None else "–",
            f"{row.seconds:.2f} s",
        )
    screen.table(table)
    for row in rows:
        if row.status == "unsupported":
            screen.say(f"left out {row.planner}: {row.why}")
    _show_own_layouts(screen, candidates)


def _show_own_layouts(screen: Screen, rows: Sequence[PlanComparison]) -> None:
    """Show each layout that the user gave, next to the best plan that a planner found."""
    times = [row.iteration_ns for row in rows if row.layout is None and row.iteration_ns is not None]
    best = f"; best {duration(min(times))}" if times else ""
    for row in rows:
        if row.layout is not None:
            time = f"does not fit: {row.why}" if row.iteration_ns is None else duration(row.iteration_ns)
            screen.say(f"yours: {row.layout}: {time}{best}")
