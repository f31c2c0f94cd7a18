"""Degrees that a trainer refuses, or trains otherwise than a profile states.

.. [1] Megatron-Core, ``transformer/transformer_config.py``. torchtitan, ``distributed/parallel_dims.py``. DeepSpeed,
   ``runtime/pipe/module.py``: its layers know only the degree of the user's own model parallel unit.
"""

from __future__ import annotations

from penstock.layouts.drawn import Expressed
from penstock.schemas.errors import Fault, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import ContextKind
from penstock.schemas.transformers.degrees import Degrees as StatedDegrees
from penstock.shapes.layout import FRAMEWORKS, Layout
from penstock.shapes.legality import broken
from penstock.solvers.model.degrees import Degrees


def refuse_illegal(plan: Expressed, target: str) -> None:
    """Raise UnsupportedRequest for degrees that the trainer refuses, with its rule and the numbers."""
    if plan.degrees != Degrees() and target not in FRAMEWORKS:
        raise UnsupportedRequest(
            f"{target} cannot express this plan: it has {plan.degrees}, and its PipelineModule cannot split a layer "
            "over several GPUs",
            faults=(Fault("/plan/degrees", str(plan.degrees), "target"),),
            remedy="plan with --tensor 1 (degrees: [{}] in a request), or another trainer",
        )
    if plan.profile.shape is None or target not in FRAMEWORKS:
        return
    layout = Layout(
        **plan.degrees._asdict(),
        pipeline=plan.ranks,
        data=plan.replicas,
        micro_batch_size=plan.rows,
        global_batch_size=plan.global_batch_size,
        sharding=plan.sharding,
        framework=FRAMEWORKS[target],
        context_kind=plan.context_kind,
    )
    rules = [rule for rule in broken(plan.profile.shape, layout, plan.world) if rule.rule != "layers"]  # cut as stated
    if rules:
        raise UnsupportedRequest(
            f"{target} cannot express this plan: {rules[0].sentence}",
            faults=tuple(Fault("/plan/degrees", rule.sentence, "target") for rule in rules),
            remedy="plan with degrees that the trainer supports: `penstock fits` lists them",
        )


def refuse_beyond_degrees(request: PlanRequest) -> None:
    """Raise UnsupportedRequest for degrees that the request allows and its target refuses for every plan."""
    profile, target = request.profile, request.target
    if target is None or request.degrees is None or isinstance(profile, str):
        return
    available = [variant.degrees for variant in profile.variants or ()]
    requested = request.degrees if isinstance(request.degrees, tuple) else (request.degrees,)
    allowed = available if request.degrees == "auto" else [each for each in requested if each != "auto"]
    refused = [(each, why) for each in allowed if (why := _why_refused(profile, Degrees(**each.model_dump()), target))]
    if refused:
        raise UnsupportedRequest(
            f"{target} has no plans at {refused[0][0]}: {refused[0][1]}",
            faults=tuple(Fault("/degrees", f"{each}: {why}", "target") for each, why in refused),
            remedy="name degrees that the trainer supports (--tensor, --expert …), or leave them at 1",
        )


def legal_degrees(profile: ModelProfile, target: str) -> tuple[StatedDegrees, ...]:
    """Return the degrees that a profile has costs at and a trainer trains, with degrees of 1 first."""
    available = [StatedDegrees(), *(variant.degrees for variant in profile.variants or ())]
    return tuple(
        each for each in dict.fromkeys(available) if _why_refused(profile, Degrees(**each.model_dump()), target) is None
    )


def _why_refused(profile: ModelProfile, degrees: Degrees, target: str) -> str | None:
    """Return the rule that breaks on any number of GPUs."""
    if degrees == Degrees():
        return None
    if target not in FRAMEWORKS:
        return "its PipelineModule cannot split a layer over several GPUs"
    if profile.shape is None:
        return None
    layout = Layout(**degrees._asdict(), data=degrees.meshes, framework=FRAMEWORKS[target])
    return next((rule.sentence for rule in broken(profile.shape, layout, degrees.cell)), None)


def unlike(profile: ModelProfile, degrees: Degrees, target: str, kind: ContextKind | None) -> tuple[str, ...]:
    """Return sentences on differences between the profile's costs at these degrees and the trainer."""
    sentences = [other] if (other := other_kernels(profile, target)) else []
    if degrees == Degrees():
        return tuple(sentences)
    if target == "torchtitan" and kind not in (None, "all_gather"):
        sentences.append(f"the plan's costs are those of {kind.replace('_', '-')}; torchtitan gathers keys and values")
    return tuple(sentences)


def other_kernels(profile: ModelProfile, target: str) -> str | None:
    """Return a sentence where the profile's costs are for another trainer's kernels; None where they are not."""
    framework = profile.framework
    if framework is None or FRAMEWORKS.get(target, framework) == framework:
        return None
    return f"the plan's costs are those of the framework {framework}, not of {target}"
