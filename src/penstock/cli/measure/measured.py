"""Measurements of a run: lines that compare them with the prediction, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.executor.run.local import RunReport
    from penstock.schemas.api.jobs import RunOut
    from penstock.schemas.api.run_options import RunOptions
    from penstock.schemas.plan import Plan


def measured_lines(plan: Plan, ended: RunReport | RunOut, options: RunOptions) -> list[str]:
    """Return lines with losses, the measured and the predicted time, and the comparison with a single process.

    In fp16 ranks compare the first loss alone (``executor.run.check``), and report 0 for the gradients.
    """
    from penstock.calibration.comparing import compared
    from penstock.schemas.amounts import duration, number
    from penstock.schemas.trace import Hardware

    step_times_ns, losses, gradient_check = ended.step_times_ns, ended.losses, ended.gradient_check
    lines = []
    if losses:
        first, last = ("unknown" if loss is None else number(loss, ".6f") for loss in (losses[0], losses[-1]))
        lines.append(f"loss       {first} in the first step, {last} in the last of {len(losses)}")
    median = median_time_ns(step_times_ns)
    if median is not None:
        how = f" (median of {len(step_times_ns)})"
        if plan.prediction is None:
            lines.append(f"measured   {duration(median)} per global batch{how}")
        else:
            predicted = plan.prediction.time_per_global_batch_ns
            lines += compared(predicted, median, [Hardware.model_validate(one) for one in ended.hardware]).lines(how)
    if gradient_check is not None and options.precision == "fp16":
        lines.append("gradients  not compared in fp16, whose first steps may be skipped; the first loss was")
    elif gradient_check is not None:
        lines.append(f"gradients  {gradient_check:.3g} apart from a single process, relative to the largest")
    return lines


def collective_lines(report: RunReport | RunOut) -> list[str]:
    """Return a line that counts the collectives by kind; no line where none were compared or some ran otherwise."""
    ran = report.collectives
    if not ran or report.collectives_differ is not None:
        return []
    kinds = ", ".join(f"{name.replace('_', '-')} {number}" for name, number in sorted(ran.items()))
    return [f"collectives {sum(ran.values())} ran as predicted ({kinds})"]


def memory_lines(plan: Plan, report: RunReport) -> list[str]:
    """Return a line per device with its measured and its predicted peak, without the context, which no tensor holds."""
    from penstock.schemas.amounts import amount

    device_of = {trace["rank"]: trace["device"] for trace in report.rank_traces}
    measured: dict[str, int] = {}
    for rank, peak_bytes in enumerate(report.peak_memory_bytes):
        measured[device_of[rank]] = measured.get(device_of[rank], 0) + peak_bytes
    lines = []
    for use in plan.prediction.devices if plan.prediction is not None else ():
        if use.device in measured:
            predicted, actual = use.peak_memory_bytes - use.memory.context_bytes, measured[use.device]
            apart = f"{100 * (predicted / max(1, actual) - 1):+.1f} % against it"
            lines.append(f"memory     {use.device}: {amount(actual)} measured, {amount(predicted)} predicted, {apart}")
    return lines


def median_time_ns(step_times_ns: Sequence[int]) -> int | None:
    """Return the median time of a step in ns; None without steps."""
    times = sorted(step_times_ns)
    return times[len(times) // 2] if times else None


def figures(plan: Plan, report: RunReport) -> dict[str, Any]:
    """Return what ``--json`` prints of a run on this machine; a service's runs have the same names."""
    from penstock.schemas.quantities import spell
    from penstock.schemas.trace import Hardware, alike

    return {
        "plan_hash": plan.content_hash(),
        "losses": [spell(loss) for loss in report.losses],
        "step_times_ns": report.step_times_ns,
        "predicted_time_per_global_batch_ns": plan.prediction.time_per_global_batch_ns if plan.prediction else None,
        "measured_time_per_global_batch_ns": median_time_ns(report.step_times_ns),
        "gradient_check": report.gradient_check,
        "collectives": report.collectives,
        "hardware": [one.model_dump() for one in alike(map(Hardware.model_validate, report.hardware))],
    }
