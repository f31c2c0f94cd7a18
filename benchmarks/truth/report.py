"""Tables of predictions against published steps, and the groups in which others' choices are scored."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from penstock.facts.device_table import Level
from penstock.schemas.errors import PenstockError
from truth.predicting import Predicted, anchored_speed, command_of, is_predictable, predicted
from truth.rows import PublishedLayout, PublishedStep, PublishedSteps, SkippedStep, grouped
from truth.scoring import RULES, Regrets, Scores, regret_of, regrets, scored

GIB = 2**30
SMALL = 0.02
"""A memory is right within this share."""
HEAD = (
    f"{'source; kind, precision':52} {'rows':>4} {'median':>7} {'size':>6} {'worst':>7} "
    f"{'inside ±':>13} {'order':>10} lack"
)


def report(rows: PublishedSteps, folder: Path, *, with_commands: bool, level: Level | None = None) -> int:
    """Print all tables, and return how many rows could not be predicted."""
    kept, failed = _predictions([row for row in rows.rows if is_predictable(row)], level=level)
    words = "each time is that of the public command" if level is None else f"at the level {level}"
    print(f"As users get it: nothing is anchored, and {words}.")
    _print_scores(kept)
    _print_regrets(kept)
    _print_memory(kept)
    anchored, further = _anchored(rows.rows) if level is None else ([], [])
    if anchored:
        print("\nAnchored: one row sets the speed of its source, kind, precision and framework: the most work a GPU,")
        print("of a dense model where there is one.")
        _print_scores(anchored)
        _print_regrets(anchored)
    _print_left_out([*rows.left_out, *failed, *further])
    if with_commands:
        _print_rows(kept, folder)
    return len(failed)


def _predictions(
    rows: Sequence[PublishedStep], speed: float = 1.0, level: Level | None = None
) -> tuple[list[Predicted], list[SkippedStep]]:
    """Return the predictions of rows, and the rows whose layout no plan can have."""
    kept, failed = [], []
    for row in rows:
        try:
            kept.append(predicted(row, speed, level))
        except PenstockError as error:
            failed.append(SkippedStep(row.source, f"{row.shape.name} on {row.gpus}: {error.detail}"))
    return kept, failed


def _anchored(rows: Sequence[PublishedStep]) -> tuple[list[Predicted], list[SkippedStep]]:
    """Return the predictions of all rows but the anchors; a group of one row has nothing to predict."""
    timed = [row for row in rows if row.is_timed]
    families = grouped(timed, lambda row: (row.source, row.kind, row.precision, row.framework))
    kept: list[Predicted] = []
    failed: list[SkippedStep] = []
    for (source, kind, precision, _), family in families.items():
        anchor, *others = sorted(family, key=lambda row: (row.shape.experts is not None, -row.work, row.gpus))
        if not others:
            failed.append(SkippedStep(source, f"one row of {kind} in {precision}: an anchor, and nothing to predict"))
            continue
        try:
            speed = anchored_speed(anchor)
        except (PenstockError, ValueError) as error:
            failed.append(SkippedStep(source, f"no anchor of {kind} in {precision}: {error}"))
            continue
        more, wrong = _predictions(others, speed)
        kept += more
        failed += wrong
    return kept, failed


def _families(rows: Sequence[Predicted]) -> Iterator[tuple[str, list[Predicted]]]:
    """Yield predictions by source, kind and precision, and all of them."""
    yield from sorted(grouped(rows, lambda row: f"{row.row.source}; {row.row.kind}, {row.row.precision}").items())
    yield "all", list(rows)


def _print_scores(rows: Sequence[Predicted]) -> None:
    print(HEAD)
    sizes = []
    for name, family in _families(rows):
        scores = scored(family)
        sizes += [scores.size] if name != "all" and scores.timed else []
        print(f"{name:52} {_figures(scores)}")
    if sizes:
        print(f"{'median over sources of the median size':52} {'':4} {'':7} {median(sizes):6.1%}")


def _figures(scores: Scores) -> str:
    order = f"{scores.right / scores.pairs:.0%} of {scores.pairs}" if scores.pairs else "–"
    errors = f"{'–':>7} {'–':>6} {'–':>7} {'–':>13}"
    if scores.timed:
        inside = f"{scores.inside / scores.timed:.0%} in {scores.stated:.0%}"
        errors = f"{scores.signed:+7.1%} {scores.size:6.1%} {scores.worst:+7.1%} {inside:>13}"
    return f"{scores.rows:4} {errors} {order:>10} {scores.lacking:4}"


def _print_regrets(rows: Sequence[Predicted]) -> None:
    """Print the regret of the prediction's choice and of the best simple rule of each source with a choice."""
    print(f"{'regret of the chosen layout':40} {'groups':>6} {'mean':>7} {'95 %':>7}   the best simple rule")
    for source, family in sorted(grouped(rows, lambda row: row.row.source).items()):
        if (both := regrets(family)) is None:
            continue
        predicted_choice, rules = both
        best = min(rules, key=lambda name: rules[name].mean)
        figures = f"{predicted_choice.groups:6} {predicted_choice.mean:7.1%} {predicted_choice.high:7.1%}"
        print(f"{source:40} {figures}   {_regret(rules[best])}: {best}")


def _regret(figures: Regrets) -> str:
    return f"{figures.mean:.1%}, {figures.high:.1%}"


def _print_memory(rows: Sequence[Predicted]) -> None:
    """Print how the allocated memory of the fullest GPU compares with the measured one."""
    with_memory = [row for row in rows if row.row.measured_bytes is not None]
    if with_memory:
        errors = [row.peak_bytes / (row.row.measured_bytes or 1) - 1 for row in with_memory]
        inside = sum(abs(error) <= SMALL for error in errors)
        worst = max(errors, key=abs)
        print(f"memory: {inside} of {len(errors)} within {SMALL:.0%}, median size "
              f"{median(map(abs, errors)):.1%}, worst {worst:+.1%}")  # fmt: skip


def _print_left_out(left_out: Sequence[SkippedStep]) -> None:
    print("\nLeft out:")
    for (source, why), count in sorted(Counter(left_out).items()):
        print(f"  {count:4} of {source}: {why}")


def _print_rows(rows: Sequence[Predicted], folder: Path) -> None:
    print("\nRow by row, with the command that prints the predicted time as that of its layout:")
    for row in rows:
        times = f"measured {row.row.seconds:.4g} s, predicted {row.seconds:.4g} s, {row.error:+.1%}"
        if not row.row.is_timed:
            times = f"compared with others of its source; predicted {row.seconds:.4g} s"
        if row.row.measured_bytes is not None:
            times += f"; {row.row.measured_bytes / GIB:.2f} GiB, predicted {row.peak_bytes / GIB:.2f}"
        if row.row.unmodelled:
            times += f"; not modelled: {', '.join(row.row.unmodelled)}"
        print(f"{row.row.source}, {row.row.model} on {row.row.gpus} {row.row.kind}: {times}")
        print(f"  {command_of(row.row, folder)}")


def groups_of(rows: Sequence[PublishedStep]) -> dict[str, list[PublishedStep]]:
    """Return the groups in which there is a choice, by the names that a file of choices uses."""
    groups = grouped(rows, lambda row: row.group).values()
    several = [group for group in groups if len({row.layout for row in group}) > 1]
    return {_name(group[0]): group for group in several}


def _name(row: PublishedStep) -> str:
    board = f", {row.memory_bytes / GIB:.1f} GiB" if row.memory_bytes else ""
    return f"{row.source}: {row.model}, {row.gpus} {row.kind}{board}, {row.precision}, batch {row.batch}"


def print_groups(rows: Sequence[PublishedStep]) -> None:
    """Print each group as a line of JSON: its model, its GPUs and the layouts to choose from."""
    for name, group in groups_of(rows).items():
        row = group[0]
        line: Mapping[str, Any] = {
            "group": name,
            "shape": row.shape.model_dump(mode="json", exclude_defaults=True),
            "framework": row.framework,
            "cluster": row.cluster,
            "memory_bytes": row.memory_bytes,
            "global_batch_size": row.batch,
            "precision": row.precision,
            "layouts": [each.layout._asdict() for each in group],
        }
        print(json.dumps(line))


def score_choices(rows: Sequence[PublishedStep], path: Path) -> int:
    """Print the regret of another planner's choices, by source, beside the rules; return how many are no choice.

    ``path``: lines of JSON with ``group`` and ``layout``, as ``print_groups`` prints them.
    """
    groups, wrong = groups_of(rows), 0
    chosen: dict[str, list[float]] = defaultdict(list)
    by_rule: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            choice = json.loads(text)
            group = groups[choice["group"]]
            regret = regret_of(group, PublishedLayout(**choice["layout"]))
        except (ValueError, KeyError, TypeError) as error:
            wrong += 1
            print(f"{path}:{number}: not a choice of a group's layout: {type(error).__name__}: {error}")
            continue
        source = group[0].source
        chosen[source].append(regret)
        for name, rule in RULES.items():
            by_rule[source][name].append(regret_of(group, min((row.layout for row in group), key=rule)))
    for source, each in sorted(chosen.items()):
        print(f"{source}: regret {_regret(Regrets.of(each))} (mean, 95 %) in {len(each)} groups")
        for name, values in by_rule[source].items():
            print(f"  {_regret(Regrets.of(values))} by the rule: {name}")
    return wrong
