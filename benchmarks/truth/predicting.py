"""The answer that users get for a row: a plain layout judged with the defaults of commands, and its command."""

from __future__ import annotations

import shlex
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from penstock.examples.catalogue import SHAPES, cluster, shape
from penstock.facts.device_table import Level
from penstock.layouts.plain import written_layout
from penstock.planning.inputs import find_profile, with_choices
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, DeviceKind
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import computed_profile
from truth.rows import SIXTEEN, PublishedStep

LEAST_STEP = 1e-6
"""The least step of the search for a speed, as a part of it."""


class Predicted(NamedTuple):
    """The prediction of a row: seconds, the stated error, and the memory that its fullest GPU lacks and allocates."""

    row: PublishedStep
    seconds: float
    expected_error: float
    missing_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float:
        """The error of the time, as a share of the measured time."""
        return self.seconds / self.row.seconds - 1

    @property
    def is_inside(self) -> bool:
        """True if the measured time is within the stated error of the prediction."""
        return abs(self.error) <= self.expected_error


def predicted(row: PublishedStep, speed: float = 1.0, level: Level | None = None) -> Predicted:
    """Judge a row's layout as commands do, on GPUs that compute ``speed`` times as fast as in the table of devices.

    ``level``: of the table's efficiencies; None: the usual one. Raises PenstockError for a layout that no plan has.
    """
    answer = written_layout(request_of(row, speed, level), row.layout.words).layout
    prediction = answer.file.plan.prediction
    assert prediction is not None
    peak = max(device.peak_memory_bytes - device.memory.context_bytes for device in prediction.devices)
    seconds = prediction.time_per_global_batch_ns / 1e9
    return Predicted(row, seconds, prediction.expected_error or 0.0, answer.missing_bytes, peak)


def request_of(row: PublishedStep, speed: float = 1.0, level: Level | None = None) -> PlanRequest:
    """Return the request of a row's command, at speed 1 and the usual level."""
    return with_choices(
        PlanRequest(
            profile=_profile(row._replace(source="", kind="", gpus=0, batch=0, seconds=0, measured_bytes=None), level),
            topology=_topology(row, speed),
            global_batch_size=row.batch,
            target=row.target,  # type: ignore[arg-type]
        )
    )


@lru_cache(maxsize=64)
def _profile(row: PublishedStep, level: Level | None) -> ModelProfile:
    """Return the profile of a row's model as its command has it, at the row's degrees alone."""
    layout, kind = row.layout, row.context_kind
    degrees = DegreeOptions((layout.tensor,), (layout.context,), (layout.expert,))
    if level is None and _is_shipped(row.shape):
        length = row.shape.sequence_length
        return find_profile(
            row.shape.name, framework=row.framework, sequence_length=length, degrees=degrees, context_kind=kind
        )
    sizes = (layout.micro_batch,)
    return computed_profile(row.shape, row.framework, (), sizes, degrees=degrees, context_kind=kind, level=level)


def _is_shipped(model: TransformerShape) -> bool:
    """Return whether commands know a model by its name, which may have a profile that is not computed."""
    length = model.sequence_length
    return model.name in SHAPES and shape(model.name).model_copy(update={"sequence_length": length}) == model


def _topology(row: PublishedStep, speed: float) -> ClusterTopology:
    """Return the cluster of a row, of a kind that is ``speed`` times as fast as its own."""
    topology = cluster(row.cluster)
    assert topology.uniform is not None
    uniform, kinds = topology.uniform, topology.kinds
    if row.memory_bytes is not None:
        uniform = uniform.model_copy(update={"memory_bytes": row.memory_bytes})
    if speed != 1:
        name = f"anchored {row.kind}"
        uniform = uniform.model_copy(update={"kind": name})
        base = next((each for each in kinds if each.name == row.kind), None)
        source, faster = (row.kind, 1.0) if base is None else (base.scale_from, base.speed)
        kinds = (*kinds, DeviceKind(name=name, scale_from=source, speed=speed * faster))
    return topology.model_copy(update={"uniform": uniform, "kinds": kinds})


def anchored_speed(row: PublishedStep) -> float:
    """Return the speed at which the predicted time of a row equals the measured time.

    The method is secants: a time is nearly linear in 1 / speed.
    """
    near, time = 1.0, predicted(row).seconds
    other, other_time = near * row.seconds / time, predicted(row, time / row.seconds).seconds
    while abs(other - near) > LEAST_STEP * other and other_time != time:
        slope = (other_time - time) / (other - near)
        near, time = other, other_time
        other += (row.seconds - other_time) / slope
        if other <= 0:
            raise ValueError(f"{row.source}: no speed of {row.kind} makes a step of {row.seconds} s")
        other_time = predicted(row, 1 / other).seconds
    return 1 / other


def command_of(row: PublishedStep, folder: Path) -> str:
    """Return the command that prints the prediction of a row; models and boards that are not shipped are in files."""
    layout, words = row.layout, ["penstock", "compare"]
    if _is_shipped(row.shape):
        words += ["--example", row.shape.name, "--sequence-length", row.shape.sequence_length]
        words += ["--framework", row.framework]
        words += ["--tensor", layout.tensor, "--context", layout.context, "--expert", layout.expert]
        words += ["--context-kind", row.context_kind.replace("_", "-")] if row.context_kind else []
    else:
        request = request_of(row)
        assert isinstance(request.profile, ModelProfile)
        words += ["--profile", _written(folder, request.profile)]
    if row.memory_bytes is None:
        words += ["--cluster", row.cluster]
    else:
        words += ["--topology", _written(folder, _topology(row, 1))]
    words += ["--target", row.target] if row.target else []
    return shlex.join(map(str, [*words, "-b", row.batch, "--planner", "even", "--layout", layout.words]))


def _written(folder: Path, document: ModelProfile | ClusterTopology) -> Path:
    """Write a document under the hash of its content, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document.content_hash().removeprefix('sha256:')[:16]}.json"
    path.write_text(document.text(), encoding="utf-8")
    return path


def is_predictable(row: PublishedStep) -> bool:
    """Return whether a prediction without an anchor is of the row's precision, or its order alone counts."""
    return row.precision == SIXTEEN or not row.is_timed
