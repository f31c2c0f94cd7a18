"""The plan request of a layout: the trainer's text fills in what the request of its import leaves out."""

from __future__ import annotations

from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import DEVICES
from penstock.importers.cluster.hostlist import expand
from penstock.layouts.layout_text import LayoutText, Source
from penstock.layouts.models import TEXTS, profile_at
from penstock.planning.inputs import find_profile, find_shape
from penstock.schemas.api.layouts import LayoutJob, LayoutRequest
from penstock.schemas.api.terms import Terms
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.shapes.hugging_face import remarks
from penstock.shapes.routing import Routing


def text_of(question: LayoutRequest) -> LayoutText:
    """Parse the text of a layout. Raises InvalidDocument saying where, UnsupportedRequest for scripts of others."""
    if not question.layout.strip():
        raise InvalidDocument(
            f"{question.source} is empty", remedy="give Megatron's script, torchtitan's settings, DeepSpeed's parts, …"
        )
    return TEXTS[question.format](
        Source(question.layout, question.source, question.values, question.config, question.pipeline_parallel_size)
    )


def plan_request(question: LayoutRequest, text: LayoutText, terms: Terms) -> PlanRequest:
    """Return the request with the text's model and batch where none is stated; degrees and sharding are the text's.

    Raises InvalidDocument and UnsupportedRequest for what neither says, and for a model that has not these degrees.
    """
    job = question.request
    assert isinstance(job.topology, ClusterTopology)
    model_is_said = any(model is not None for model in (job.profile, job.shape, job.hugging_face))
    text.ask(batch=job.global_batch_size is None, model=not model_is_said)
    batch = job.global_batch_size or text.batch(_gpus(question, job.topology))
    if batch is None:
        raise InvalidDocument(
            f"{question.source} does not say the global batch size",
            faults=(Fault("/request/global_batch_size", "neither the request nor the layout has it", "missing"),),
            remedy="--global-batch-size, or the field global_batch_size of the request",
        )
    most = terms.most_micro_batches
    if most is not None and batch > most * (question.micro_batch_size or 1):
        raise UnsupportedRequest(
            f"{question.source} trains {batch} samples a step, which is more than the limit of {most} micro-batches",
            remedy="state the micro-batch size, or have the operator raise max_micro_batches",
        )
    fields = {name: getattr(job, name) for name in job.model_fields_set & PlanRequest.model_fields.keys()}
    profile = _profile(question, text, job, job.topology)
    return PlanRequest.parse(fields | {"profile": profile, "global_batch_size": batch})


def _gpus(question: LayoutRequest, topology: ClusterTopology) -> int | None:
    """Return the GPUs of the job; None for nodes that the cluster lacks, which is said where they are placed."""
    nodes = {node.name: node.devices[: question.devices_per_node] for node in topology.expanded().nodes}
    names = expand(question.nodes) if question.nodes else list(nodes)
    return sum(device.gpus for name in names for device in nodes.get(name, ())) or None


def _profile(question: LayoutRequest, text: LayoutText, job: LayoutJob, topology: ClusterTopology) -> ModelProfile:
    """Return the stated profile, or one of the stated or the text's transformer at the text's degrees."""
    assert not isinstance(job.profile, str)
    stated = job.shape or job.hugging_face
    routing = Routing(job.routing_imbalance, job.capacity_factor)
    is_shipped = job.shape is not None and text.framework is None and job.shape == SHAPES.get(job.shape.name)
    costed = job.shape.name if job.shape is not None and is_shipped else job.profile
    if costed is not None:  # whose costs exist: what would change them is refused for a profile
        return find_profile(
            costed,
            framework=job.framework,
            sequence_length=job.sequence_length,
            context_kind=job.context_kind,
            routing=routing,
        )
    shape = find_shape(stated or text.shape(), job.sequence_length, routing)
    profile = profile_at(
        text,
        question.source,
        shape,
        () if stated is not None else _kinds(topology),
        framework=job.framework,
        context_kind=job.context_kind,
        compare=question.compare,
    )
    notes = () if job.hugging_face is None else tuple(remarks(job.hugging_face))
    return profile.model_copy(update={"assumptions": (*profile.assumptions, *notes)})


def _kinds(topology: ClusterTopology) -> list[str]:
    """Return the kinds of devices whose costs the cluster's devices have."""
    named = dict.fromkeys(device.kind for node in topology.expanded().nodes for device in node.devices)
    return list(dict.fromkeys((topology.costed_from(kind, DEVICES) or (kind, 1.0))[0] for kind in named))
