"""Launch of a job that a scheduler starts: what to train, under which name, with whose image and queue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError

from penstock.schemas.document import Part, faults_of
from penstock.schemas.errors import Fault, InvalidDocument
from penstock.schemas.quantities import MAX_WIRE_INTEGER

Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line without control characters. It may hold any other character, and is quoted where it is used."""
Reference = Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$")]
Assignment = Annotated[str, Field(max_length=32768, pattern=r"^[A-Za-z_][A-Za-z0-9_]*=[^\x00]*$")]
SlurmWord = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z0-9_@][A-Za-z0-9_.,@+:-]*$")]
Label = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name in Kubernetes (RFC 1123)."""
Subdomain = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"([a-z0-9.-]+/)?{_NAME}"
LabelKey = Annotated[str, Field(max_length=317, pattern=f"^{_KEY}$")]
SbatchOption = Annotated[str, Field(max_length=1024, pattern=r"^--[a-z][a-z0-9-]*(=[^\s'\"\\#]+)?$")]
"""An option in its long form. Slurm reads it out of a comment, where quotes and signs of numbers mean something."""
SrunOption = Annotated[str, Field(max_length=4096, pattern=r"^--[a-z][a-z0-9-]*(=[^\x00-\x1f\x7f]*)?$")]
"""An option in its long form; it is quoted where it is used."""
Labelled = Annotated[str, Field(max_length=381, pattern=f"^{_KEY}=({_NAME})?$")]
Annotation = Annotated[str, Field(max_length=32768, pattern=rf"^{_KEY}=[^\x00]*$")]
Counted = Annotated[int, Field(ge=0, le=MAX_WIRE_INTEGER)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_WIRE_INTEGER)]


def _object_text(value: Any) -> Any:
    """Return a JSON object as text, from an object or from text. Raises ValueError for anything else."""
    if isinstance(value, str):
        value = json.loads(value)  # JSONDecodeError is a ValueError that says where
    if not isinstance(value, Mapping):
        raise ValueError('expected an object, such as {"nodeSelector": {"disk": "fast"}}')
    return json.dumps(value)


Object = Annotated[str, BeforeValidator(_object_text), Field(max_length=65536)]
"""A JSON object as text, so that a query can carry it; a settings file may hold the object itself."""


class LaunchSettings(Part):
    """Settings that a launch needs and a plan does not have. A target refuses settings that would have no effect there.

    Values may come as text (a command line, a query).
    """

    model: Reference | None = Field(default=None, description="what is trained, as module:attribute")
    directory: Text | None = Field(default=None, description="directory of the training project on the nodes")
    steps: AtLeastOne | None = Field(default=None, description="train up to this step")
    seed: Counted | None = Field(default=None, description="of parameters and data")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = Field(default=None, description="of the computation")
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="largest norm of the whole gradient"
    )
    checkpoint: Text | None = Field(default=None, description="write checkpoints here, and resume from the newest one")
    checkpoint_every: Counted | None = Field(default=None, description="steps between checkpoints")
    keep_checkpoints: AtLeastOne | None = Field(default=None, description="how many of them are kept")
    evaluate_every: Counted | None = Field(default=None, description="steps between evaluations")
    staleness: Annotated[int, Field(ge=0, le=1)] | None = Field(
        default=None, description="elastic averaging: age of the reference model"
    )
    release: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+)*$", max_length=32)] | None = Field(
        default=None, description="torchtitan: the release that the file is written for; else the newest known"
    )
    advance_forward: bool = Field(default=False, description="search while training how far forwards run ahead")
    transport: Literal["auto", "gloo", "nccl"] = Field(default="auto", description="what the programs are lowered for")
    report: Text | None = Field(default=None, description="file that rank 0 writes its report to")
    environment: tuple[Assignment, ...] = Field(default=(), description="NAME=value for every rank; may be repeated")
    command: Text = Field(default="penstock", description="command that runs penstock on the nodes")
    name: Text | None = Field(default=None, description="of the job; made legal for its target")
    nodes: Literal["named", "any"] | None = Field(
        default=None, description="named: the plan's own nodes; any: whichever the scheduler gives, in their places"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(default=None, description="where the ranks meet")
    restarts: Counted | None = Field(default=None, description="how often the whole job is started again")
    partition: SlurmWord | None = Field(default=None, description="Slurm: partition")
    account: SlurmWord | None = Field(default=None, description="Slurm: account")
    qos: SlurmWord | None = Field(default=None, description="Slurm: quality of service")
    constraint: SlurmWord | None = Field(default=None, description="Slurm: feature that every node has")
    time_limit: Annotated[str, Field(pattern=r"^[0-9]+((-[0-9]+)?(:[0-9]+){0,2})$", max_length=32)] | None = Field(
        default=None, description="Slurm: minutes, hours:minutes:seconds or days-hours:minutes:seconds"
    )
    cpus_per_task: AtLeastOne | None = Field(default=None, description="CPUs of each rank")
    switches: AtLeastOne | None = Field(
        default=None, description="Slurm, any nodes: the most leaf switches that the job may span"
    )
    segment: AtLeastOne | None = Field(default=None, description="Slurm, any nodes: nodes of one block together")
    sbatch_options: tuple[SbatchOption, ...] = Field(
        default=(), description="Slurm: further options of sbatch, such as --reservation=night; may be repeated"
    )
    srun_options: tuple[SrunOption, ...] = Field(
        default=(), description="Slurm: further options of srun, such as --container-image=…; may be repeated"
    )
    setup: tuple[Text, ...] = Field(
        default=(), description="a line of shell before the ranks start, such as module load cuda; may be repeated"
    )
    image: Text | None = Field(default=None, description="Kubernetes: container image with penstock and the model")
    namespace: Label | None = Field(default=None, description="Kubernetes: namespace")
    queue: Subdomain | None = Field(default=None, description="Kueue: local queue; Volcano: queue")
    runtime: Subdomain = Field(default="torch-distributed", description="Kubeflow Trainer: ClusterTrainingRuntime")
    gpu_resource: LabelKey = Field(default="nvidia.com/gpu", description="Kubernetes: resource of the devices")
    claim: Subdomain | None = Field(default=None, description="Kubernetes: volume claim for data and checkpoints")
    mount: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f:]*$", max_length=1024)] = Field(
        default="/data", description="Kubernetes: where the claim is mounted"
    )
    bundle_path: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=1024)] | None = Field(
        default=None, description="Kubernetes: where job.json is in the container, instead of a ConfigMap"
    )
    labels: tuple[Labelled, ...] = Field(
        default=(), description="Kubernetes: KEY=VALUE for the job and its pods; may be repeated"
    )
    annotations: tuple[Annotation, ...] = Field(
        default=(), description="Kubernetes: KEY=VALUE for the job and its pods; may be repeated"
    )
    pod: Object | None = Field(default=None, description="Kubernetes: further fields of every pod's spec, as an object")
    container: Object | None = Field(
        default=None, description="Kubernetes: further fields of every pod's container, as an object"
    )
    topology_level: LabelKey | None = Field(
        default=None, description="Kueue: node label of the level within which neighbouring stages stay"
    )
    highest_tier: AtLeastOne | None = Field(
        default=None, description="Volcano: highest tier of HyperNode within which neighbouring stages stay"
    )

    @classmethod
    def repeated(cls) -> frozenset[str]:
        """Return the settings that may be given several times."""
        return frozenset(name for name, field in cls.model_fields.items() if field.default == ())

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate plain data, numbers as text too. Raises InvalidDocument with one fault per mistake."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            faults = tuple(_explained(fault) for fault in faults_of(error.errors(), data))
            raise InvalidDocument("the launch settings are not valid", faults=faults) from None


def _explained(fault: Fault) -> Fault:
    """Add the description of the setting to a fault."""
    field = LaunchSettings.model_fields.get(fault.pointer.split("/")[1] if fault.pointer else "")
    what = field.description if field is not None else None
    return fault if what is None else replace(fault, detail=f"{what}. {fault.detail}")
