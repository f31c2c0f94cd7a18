"""Options that several commands have, in the groups that their help shows.

What a request's options are called and what is said of them stands in ``schemas.options``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from penstock.cli import completion
from penstock.cli.degree_options import axes_of, numbers_of
from penstock.cli.durations import METAVAR, between
from penstock.schemas.options.option import CHECKPOINTS as CHECKPOINTS
from penstock.schemas.options.option import DEGREES as DEGREES
from penstock.schemas.options.option import LAUNCH as LAUNCH
from penstock.schemas.options.option import MEASUREMENT as MEASUREMENT
from penstock.schemas.options.option import MODEL as MODEL
from penstock.schemas.options.option import OUTPUT as OUTPUT
from penstock.schemas.options.option import PLANNER as PLANNER
from penstock.schemas.options.option import RUN as RUN
from penstock.schemas.options.option import SEARCH as SEARCH
from penstock.schemas.options.option import TRAINING as TRAINING
from penstock.schemas.options.option import Option
from penstock.schemas.options.planning import PLAN_OPTIONS

SERVICE = "Service"

LONGEST = "11d"
"""The longest search, run or wait that an option can ask for."""


def shown(option: Option, *short: str, **more: Any) -> Any:
    """Return an option as typer reads it, with its short name and what typer alone needs."""
    return typer.Option(
        option.flag,
        *short,
        metavar=option.shown_values or None,
        help=option.command_help,
        rich_help_panel=option.panel,
        show_default=False,
        **more,
    )


Topology = Annotated[
    str | None, typer.Option("--topology", "-t", help="Topology file (JSON or YAML); - is standard input.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="Cluster by name: a shipped one (dapple-config-a) or NODESxDEVICESxKIND (2x8xH100).",
        autocompletion=completion.clusters,
    ),
]
Batch = Annotated[int | None, shown(PLAN_OPTIONS["global_batch_size"], "-b")]
Request = Annotated[
    str | None,
    typer.Option(
        "--request", help="Plan request file (JSON or YAML); other options override its fields.", rich_help_panel=MODEL
    ),
]
Planner = Annotated[str | None, shown(PLAN_OPTIONS["planner"], autocompletion=completion.planners)]
Schedule = Annotated[str | None, shown(PLAN_OPTIONS["schedule"], autocompletion=completion.schedules)]
Planners = Annotated[
    list[str] | None,
    shown(
        replace(PLAN_OPTIONS["planner"], default="all that apply", is_repeatable=True),
        autocompletion=completion.planners,
    ),
]
Schedules = Annotated[
    list[str] | None,
    shown(
        replace(PLAN_OPTIONS["schedule"], default="what each planner chooses", is_repeatable=True),
        autocompletion=completion.schedules,
    ),
]
Settings = Annotated[list[str] | None, shown(PLAN_OPTIONS["options"])]
Seed = Annotated[int | None, shown(PLAN_OPTIONS["seed"])]
Workers = Annotated[int | None, shown(PLAN_OPTIONS["workers"], min=1)]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|URL",
        help="Database: an SQLite file or a URL, such as postgresql://planner/penstock (default: settings).",
        rich_help_panel=SERVICE,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="TOML file with settings (docs/settings.md lists them); variables PENSTOCK_… and options override it.",
        rich_help_panel=SERVICE,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", help="File that the plan is written to; - is standard output.", rich_help_panel=OUTPUT
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.", rich_help_panel=OUTPUT)
]
PlanPath = Annotated[
    str,
    typer.Argument(
        metavar="PLAN",
        help="Plan file, or - for standard input; with --server also the hash or the job of a plan.",
    ),
]
Document = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", help="File that is written; - is standard output.", rich_help_panel=OUTPUT
    ),
]
MeasureFor = Annotated[
    int,
    typer.Option(
        "--measure-for",
        parser=between("100ms", "1h"),
        metavar=METAVAR,
        show_default="10s",
        help="Time that one measurement takes at most: 500ms, 1min.",
        rich_help_panel=MEASUREMENT,
    ),
]
Job = Annotated[
    str,
    typer.Option(
        "--job",
        metavar="MODULE:ATTRIBUTE",
        help="Training job to import, such as mytrain:job or examples.gpt:job.",
        rich_help_panel=RUN,
    ),
]
Directory = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Directory of the training project, from which the job is imported (default: the current one).",
        rich_help_panel=RUN,
    ),
]


HuggingFace = Annotated[
    str | None,
    typer.Option(
        "--hf",
        metavar="FILE",
        help="File config.json of a Hugging Face model, instead of --example.",
        rich_help_panel=MODEL,
    ),
]
SequenceLength = Annotated[int | None, shown(PLAN_OPTIONS["sequence_length"], min=1)]
Framework = Annotated[str | None, shown(PLAN_OPTIONS["framework"])]
ContextKind = Annotated[str | None, shown(PLAN_OPTIONS["context_kind"])]
RoutingImbalance = Annotated[float | None, shown(PLAN_OPTIONS["routing_imbalance"])]
CapacityFactor = Annotated[float | None, shown(PLAN_OPTIONS["capacity_factor"])]
Context = Annotated[list[str] | None, shown(PLAN_OPTIONS["context"])]
Expert = Annotated[list[str] | None, shown(PLAN_OPTIONS["expert"])]
ExpertTensor = Annotated[int | None, shown(PLAN_OPTIONS["expert_tensor"])]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model's costs, by file or by name."""

    PANEL: ClassVar[str] = MODEL

    profile: Annotated[
        str | None, typer.Option("--profile", "-p", help="Profile file of the model (JSON); - is standard input.")
    ] = None
    example: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Shipped model instead of --profile, such as gpt2-small or bert-48.",
            autocompletion=completion.models,
        ),
    ] = None
    hf: HuggingFace = None
    sequence_length: SequenceLength = None
    framework: Framework = None
    context_kind: ContextKind = None
    routing_imbalance: RoutingImbalance = None
    capacity_factor: CapacityFactor = None


@dataclass(frozen=True, kw_only=True)
class Question(Model):
    """The model, the cluster and the global batch to plan for."""

    topology: Topology = None
    cluster: Cluster = None
    global_batch_size: Batch = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Options for counting memory and transfers."""

    PANEL: ClassVar[str] = TRAINING

    recompute: Annotated[str | None, shown(PLAN_OPTIONS["recompute"])] = None
    network: Annotated[str | None, shown(PLAN_OPTIONS["network"])] = None
    optimizer: Annotated[str | None, shown(PLAN_OPTIONS["optimizer"])] = None


@dataclass(frozen=True, kw_only=True)
class Training(Costs):
    """Options for the training: micro-batch sizes, update rules, the codec of sent tensors."""

    micro_batch_size: Annotated[list[int] | None, shown(PLAN_OPTIONS["micro_batch_sizes"])] = None
    update_rule: Annotated[list[str] | None, shown(PLAN_OPTIONS["update_rules"])] = None
    codec: Annotated[str | None, shown(PLAN_OPTIONS["codec"])] = None


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of parallelism, and the sharding of states over replicas."""

    PANEL: ClassVar[str] = DEGREES

    tensor: Annotated[list[str] | None, shown(PLAN_OPTIONS["tensor"])] = None
    context: Context = None
    expert: Expert = None
    expert_tensor: ExpertTensor = None
    sharding: Annotated[str | None, shown(PLAN_OPTIONS["sharding"])] = None
    degrees: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=VALUES[:AXIS=...]",
            help="Several degrees and further axes in one: tensor=4,8:expert=auto:optimizer=adam,sgd. Repeatable.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Give each axis to the option of its name; an axis without an option stays in ``degrees``."""
        further = []
        for name, values in axes_of(self.degrees or ()):
            if name == "degrees" or name not in vars(self):
                further.append(f"{name}={values}")
                continue
            if getattr(self, name) is not None:
                raise typer.BadParameter(
                    f"{name} is given by --{name.replace('_', '-')} as well", param_hint="--degrees"
                )
            several = name in ("tensor", "context", "expert")
            number = numbers_of([values], name)[0] if name == "expert_tensor" else values
            object.__setattr__(self, name, [values] if several else number)
        object.__setattr__(self, "degrees", further or None)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits at which a search ends."""

    PANEL: ClassVar[str] = SEARCH

    time_limit: Annotated[int | None, shown(PLAN_OPTIONS["time_limit"], parser=between("0s", LONGEST))] = None
    gap: Annotated[float | None, shown(PLAN_OPTIONS["gap"])] = None
    max_plans: Annotated[int | None, shown(PLAN_OPTIONS["max_plans"])] = None
    effort: Annotated[str | None, shown(PLAN_OPTIONS["effort"])] = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Constraints on plans, and settings of the planner."""

    PANEL: ClassVar[str] = PLANNER

    target: Annotated[str | None, shown(PLAN_OPTIONS["target"])] = None
    pin: Annotated[list[str] | None, shown(PLAN_OPTIONS["pins"])] = None
    pipeline_profile: Annotated[
        str | None,
        typer.Option(
            "--pipeline-profile",
            help="File that `penstock profile --pipeline` wrote, for planner avgpipe's choice of degrees.",
        ),
    ] = None
    set_option: Settings = None
    seed: Seed = None
    workers: Workers = None


def option_values(*groups: object, **more: Any) -> Mapping[str, Any]:
    """Return the values of options by name."""
    values: dict[str, Any] = {}
    for group in groups:
        values |= vars(group)
    return values | more
