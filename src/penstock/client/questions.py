# Made from async_questions.py by scripts/make-client: change that one.
"""The questions that a service answers at once, a method for each."""

from __future__ import annotations

from collections.abc import Callable

from penstock.client.connection import Connection
from penstock.client.messages import Named, Send
from penstock.schemas.api.calibration import CalibrationOut, CalibrationRequest
from penstock.schemas.api.explanation import ExplainRequest, Explanation
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.api.jobs import CompareRequest, PlanComparison, Simulation, Verdict
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.api.listing import ListAnswer, ListRequest
from penstock.schemas.api.placement import PlacementAnswer, PlacementProgress, PlacementRequest
from penstock.schemas.api.throughput import ThroughputOut, ThroughputRequest
from penstock.schemas.api.topology_import import TopologyImport, TopologyImported
from penstock.schemas.plan import PlanQuestion


class Questions:
    """Questions to a service; nothing that they hold is stored, but an imported topology."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def verify(self, request: PlanQuestion | Named) -> Verdict:
        """Return whether a plan keeps all rules, in a sentence per fault.

        A plan with faults is an answer, not an error.
        """
        send = Send("POST", "/v1/plans:verify", request, is_safe=True)
        return self._connection.document(Verdict, send)

    def simulate(self, request: PlanQuestion | Named) -> Simulation:
        """Return a plan with its simulated prediction.

        A plan that cannot be simulated (deadlock, shape) is refused.
        """
        send = Send("POST", "/v1/plans:simulate", request, is_safe=True)
        return self._connection.document(Simulation, send)

    def compare(
        self, request: CompareRequest | Named, *, on_row: Callable[[PlanComparison], None] | None = None
    ) -> tuple[PlanComparison, ...]:
        """Return the plans of each planner with each of its schedules, on one request.

        ``planners`` and ``schedules`` restrict them. Each of ``layouts`` has a row of planner ``yours``. A planner that
        cannot take the request has a row with status ``unsupported``, whose ``why`` says what it can take.

        ``on_row`` is called with each row before the answer.
        """
        send = Send("POST", "/v1/plans:compare", request, patient=True)
        return self._connection.with_events(tuple[PlanComparison, ...], send, "row", PlanComparison, on_row)

    def explain(
        self, request: ExplainRequest | Named, *, on_progress: Callable[[str], None] | None = None
    ) -> Explanation:
        """Return what a plan's time is made of, what limits it, and what would help.

        A plan that cannot be simulated is refused. With ``layout`` the answer compares stages of yours, with
        ``why_not`` other degrees, with ``what_if`` changes of cluster, model or request.

        ``on_progress`` is called with each progress before the answer.
        """
        send = Send("POST", "/v1/plans:explain", request, patient=True)
        return self._connection.with_events(Explanation, send, "progress", str, on_progress)

    def fits(self, request: FitsRequest | Named) -> FitsAnswer:
        """Return which degrees of parallelism are legal for a transformer on a cluster, and which fit into its memory.

        Closed forms, no search. That nothing fits is an answer. A degree that no layout can have is refused, with the
        rule and the nearest legal values.
        """
        send = Send("POST", "/v1/fits", request, is_safe=True)
        return self._connection.document(FitsAnswer, send)

    def list(self, request: ListRequest | Named) -> ListAnswer:
        """Return the names of models, clusters, planners, schedules or devices that requests may use."""
        send = Send("POST", "/v1/names:list", request, is_safe=True)
        return self._connection.document(ListAnswer, send)

    def place(
        self, request: PlacementRequest | Named, *, on_progress: Callable[[PlacementProgress], None] | None = None
    ) -> PlacementAnswer:
        """Return the nodes that each job should get, with its plan, the results for other numbers of nodes, and why.

        A job that fits nowhere is an answer, with the bytes that are missing. It is refused where no device is free,
        and for nodes that the topology lacks. Without ``time_limit_ns`` large sets of nodes get regular layouts only,
        which takes seconds.

        ``on_progress`` is called with each progress before the answer.
        """
        send = Send("POST", "/v1/placements", request, patient=True)
        return self._connection.with_events(PlacementAnswer, send, "progress", PlacementProgress, on_progress)

    def calibrate(self, request: CalibrationRequest | Named) -> CalibrationOut:
        """Return a profile and a topology corrected by the traces of runs.

        ``GET /v1/runs/{id}/trace`` has the traces.
        """
        send = Send("POST", "/v1/profiles:calibrate", request, patient=True)
        return self._connection.document(CalibrationOut, send)

    def calibrate_throughput(self, request: ThroughputRequest | Named) -> ThroughputOut:
        """Return the pace of one run folded into a kind of device, and other plans predicted before and after."""
        send = Send("POST", "/v1/profiles:calibrate-throughput", request, patient=True)
        return self._connection.document(ThroughputOut, send)

    def import_topology(self, request: TopologyImport | Named) -> TopologyImported:
        """Return one topology of what Slurm, Kubernetes, drivers and fabric tools print.

        No file that the texts name is opened. The answer says what was assumed and which nodes were left out. It is
        refused, all faults at once, for what cannot be read, by line and column, for contradictions, and for whatever
        neither sources nor options say. A service keeps the topology under its hash, unless ``store`` is false; with
        ``agents`` its living agents are a source as well.
        """
        send = Send("POST", "/v1/topologies:import", request, patient=True)
        return self._connection.document(TopologyImported, send)

    def import_layout(
        self, request: LayoutRequest | Named, *, on_progress: Callable[[str], None] | None = None
    ) -> LayoutImported:
        """Return a layout of Megatron, torchtitan or DeepSpeed as a plan with simulated times.

        A request without a model or a batch takes the text's. ``rivals`` has the best plan that the same trainer can
        express, and the best of all; ``compare: false`` leaves them out. Limits of the request hold for each of their
        solves. A layout that does not fit memory is an answer. What cannot be read is refused, by line and column, as
        is what does not go with model, cluster and batch.

        ``on_progress`` is called with each progress before the answer.
        """
        send = Send("POST", "/v1/layouts:import", request, patient=True)
        return self._connection.with_events(LayoutImported, send, "progress", str, on_progress)
