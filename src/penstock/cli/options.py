"""Options that several commands have, in the groups that their help shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli import completion
from penstock.cli.degree_options import axes_of, numbers_of
from penstock.cli.durations import METAVAR, between

if TYPE_CHECKING:
    pass

MODEL = "Model and cluster"
TRAINING = "Training"
PLANNER = "Planner"
SEARCH = "Search"
OUTPUT = "Output"
SERVICE = "Service"
RUN = "Run"
CHECKPOINTS = "Checkpoints"
MEASUREMENT = "Measurement"
LAUNCH = "Launch"

LONGEST = "11d"
"""The longest search, run or wait that an option can ask for."""

Topology = Annotated[
    str | None, typer.Option("--topology", "-t", help="Topology file (JSON or YAML); - is standard input.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="Cluster by name instead of --topology: a shipped one (dapple-config-a) or NODESxDEVICESxKIND (2x8xH100).",
        autocompletion=completion.clusters,
    ),
]
Batch = Annotated[
    int | None, typer.Option("--global-batch-size", "-b", help="Samples that one training step consumes, such as 256.")
]
Request = Annotated[
    str | None,
    typer.Option(
        "--request", help="Plan request file (JSON or YAML); other options override its fields.", rich_help_panel=MODEL
    ),
]
Planner = Annotated[
    str | None,
    typer.Option(
        help="Planner to ask, such as dapple or gpipe (default: auto, which asks all that apply).",
        autocompletion=completion.planners,
        rich_help_panel=PLANNER,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="Schedule that the plan has to use, such as early-backward (1F1B) or zb-v (default: auto, the fastest).",
        autocompletion=completion.schedules,
        rich_help_panel=PLANNER,
    ),
]
Planners = Annotated[
    list[str] | None,
    typer.Option(
        help="Planner to ask, such as dapple (default: all that apply). Repeatable.",
        autocompletion=completion.planners,
        rich_help_panel=PLANNER,
    ),
]
Schedules = Annotated[
    list[str] | None,
    typer.Option(
        help="Schedule to use, such as gpipe (default: what each planner chooses). Repeatable.",
        autocompletion=completion.schedules,
        rich_help_panel=PLANNER,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="Option of the planner, such as stages=4 (docs/planners.md lists them). Repeatable.",
        rich_help_panel=PLANNER,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of every random choice (default: 0).", rich_help_panel=SEARCH)]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes that search a large request (default: one per processor). The plan does not depend on it.",
        rich_help_panel=SEARCH,
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|URL",
        help="Database of the service: an SQLite file, or a URL such as postgresql://planner/penstock (default: as in "
        "the settings).",
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
        metavar="PLAN", help="Plan file, or - for standard input; with --server also the hash or the job of a plan."
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
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of a sample of a transformer (default: the model's; 8192 at most with --hf).",
        rich_help_panel=MODEL,
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(
        metavar="megatron|torch",
        help="Compute a transformer's costs with kernels and memory of Megatron-Core and Transformer Engine, or of "
        "eager PyTorch (default: those of --target, else torch).",
        rich_help_panel=MODEL,
    ),
]
ContextKind = Annotated[
    str | None,
    typer.Option(
        metavar="ring|all-gather|all-to-all",
        help="How keys and values get to all GPUs that share a transformer's sequences (default: ring with megatron, "
        "all-gather with torch).",
        rich_help_panel=MODEL,
    ),
]
Context = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N[,N...]|auto",
        help="Groups of GPUs that share each sequence of a transformer: 4, or several to choose from, 1,2,4 (default: "
        "auto from 32,768 tokens on, else 1). Repeatable.",
        rich_help_panel=TRAINING,
    ),
]


Expert = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N[,N...]|auto",
        help="GPUs that share the experts of a layer: 8, or several to choose from, 1,8,16 (default: auto, powers of "
        "two up to 64 that divide them). Repeatable.",
        rich_help_panel=TRAINING,
    ),
]
ExpertTensor = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="GPUs that split each expert, of Megatron's (default: 1).", rich_help_panel=TRAINING
    ),
]


RoutingImbalance = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Tokens of the busiest GPU's experts over the mean, of a profile that is computed (default: 1, even).",
        rich_help_panel=MODEL,
    ),
]
CapacityFactor = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Tokens of every expert over its even share, dropped or padded to it (default: none is dropped).",
        rich_help_panel=MODEL,
    ),
]


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
    """What is to be planned: one model on one cluster."""

    topology: Topology = None
    cluster: Cluster = None
    global_batch_size: Batch = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How memory and transfers are counted."""

    PANEL: ClassVar[str] = TRAINING

    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="never|auto|always",
            help="Recompute activations in the backward pass (default: auto, where memory asks for it).",
        ),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(
            metavar="shared|private",
            help="Whether transfers compete for links or each has a channel of its own, as in the papers "
            "(default: shared).",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="sgd|momentum|adam", help="Optimizer whose states the devices have to hold (default: adam)."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Training(Costs):
    """How the model is trained."""

    micro_batch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch-size",
            help="Candidate for the samples of a micro-batch (default: powers of two that the profile covers). "
            "Repeatable.",
        ),
    ] = None
    update_rule: Annotated[
        list[str] | None,
        typer.Option(
            "--update-rule",
            help="Update rule that plans may have: synchronous, weight_stashing, double_buffered, double_grouped, "
            "elastic_averaging, or all (default: synchronous). Repeatable.",
        ),
    ] = None
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="auto",
            help="Send fp32 tensors as fp16 where that saves time; it changes numbers slightly (default: never).",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many GPUs share a layer, and what replicas share out."""

    PANEL: ClassVar[str] = TRAINING

    tensor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]|auto",
            help="GPUs that split each layer: 8, or several to choose from, 1,2,4,8 (default, as of the other "
            "degrees: auto, all that the profile has costs at; 1 with --target or --codec). Repeatable.",
        ),
    ] = None
    context: Context = None
    expert: Expert = None
    expert_tensor: ExpertTensor = None
    sharding: Annotated[
        str | None,
        typer.Option(
            metavar="none|optimizer|gradients|parameters|parameters_kept|auto",
            help="What the replicas of a stage share out; gradients and parameters, of one stage on all GPUs (default: "
            "auto where the profile has tensor degrees, else nothing).",
        ),
    ] = None
    degrees: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=VALUES[:AXIS=...]",
            help="Several degrees and further axes in one: tensor=4,8:expert=auto:optimizer=adam,sgd. Repeatable.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Give each axis to the option of its name; what has none stays in ``degrees``."""
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
    """When a search ends."""

    PANEL: ClassVar[str] = SEARCH

    time_limit: Annotated[
        int | None,
        typer.Option(
            "--time-limit",
            parser=between("0s", LONGEST),
            metavar=METAVAR,
            help="Stop after this time with the best plan so far: 30s, 5min (default: search to the end).",
        ),
    ] = None
    gap: Annotated[
        float | None,
        typer.Option(help="Stop at a plan within this share of the proven bound, such as 0.02 (default: 0)."),
    ] = None
    max_plans: Annotated[
        int | None,
        typer.Option(
            help="Plans that each planner may judge, a limit that gives the same answer on every machine "
            "(default: no limit)."
        ),
    ] = None
    effort: Annotated[
        str | None,
        typer.Option(
            metavar="quick|normal|thorough",
            help="When planners end by themselves, in counts: the same plan on every machine (default of plan, compare "
            "and sweep without another limit: normal; else thorough).",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What plans may be, beyond the model and the cluster."""

    PANEL: ClassVar[str] = PLANNER

    target: Annotated[
        str | None,
        typer.Option(
            metavar="megatron|torchtitan|deepspeed",
            help="Plan only what this trainer can express (default: no trainer's limits).",
        ),
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            metavar="LAYERS=DEVICES",
            help="Devices that alone may hold these layers: 0-6=node0/0 or 7=node1/0,node1/1. Repeatable.",
        ),
    ] = None
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


def given(*groups: object, **more: Any) -> Mapping[str, Any]:
    """The values of options by name."""
    found: dict[str, Any] = {}
    for group in groups:
        found |= vars(group)
    return found | more
