"""The judge and the lowering for the service: loaded in the background, used from worker threads."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.examples.tiny import tiny_plan_file, tiny_request
from penstock.schemas.api.jobs import PlannerOut
from penstock.schemas.errors import NotFound, PenstockError
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.schemas.trace import Trace

if TYPE_CHECKING:
    from penstock.service.db.document_store import Stores
    from penstock.solvers.model.options import Option

LOOK_S = 1.0
"""Delay between two checks whether the kernels are compiled, in seconds."""

log = logging.getLogger("penstock.service")


def check(request: PlanRequest) -> None:
    """Refuse what no planner could answer, naming the values and the nearest names.

    Raises InvalidDocument or UnsupportedRequest. Profile and topology have to be inline.
    """
    from penstock.convert import to_problem
    from penstock.planning.solve import refuse_unsupported
    from penstock.solvers.planners.catalogue import resolve

    refuse_unsupported(request)
    resolve(request.planner).check(frozenset(request.update_rules), request.schedule, request.options)
    to_problem(request)


def report(file: PlanFile, trace: Trace | None = None) -> str:
    """Return the plan's page. Raises InvalidPlan when it cannot be simulated."""
    from penstock.report.plan_files import page

    return page(file, trace)


class ProgramCache:
    """Programs of recently requested plans as JSON, one per rank."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._of = lru_cache(maxsize=8)(self._lower)

    def all(self, tenant: str, plan_hash: str) -> tuple[bytes, ...]:
        """Return the programs of all ranks. Raises NotFound."""
        return self._of(tenant, plan_hash)

    def one(self, tenant: str, plan_hash: str, rank: int) -> bytes:
        """Return the program of one rank. Raises NotFound."""
        programs = self.all(tenant, plan_hash)
        if not 0 <= rank < len(programs):
            raise NotFound(f"the plan has no rank {rank}; its ranks are 0…{len(programs) - 1}")
        return programs[rank]

    def _lower(self, tenant: str, plan_hash: str) -> tuple[bytes, ...]:
        from penstock.planning.programs.lowered import lower

        file = self._stores.of(tenant).plan_file(plan_hash)
        return tuple(json.dumps(program, separators=(",", ":")).encode() for program, *_ in lower(file).programs)


def planners() -> list[PlannerOut]:
    """Return the planners that a request may name."""
    from penstock.solvers.planners.catalogue import PLANNERS

    return [
        PlannerOut(
            name=planner.name,
            summary=planner.help,
            cites=planner.cites,
            exact=planner.exact,
            schedules=("auto", *planner.accepts),
            options={option.name: _option(option) for option in planner.options},
        )
        for planner in PLANNERS.values()
    ]


def _option(option: Option[Any]) -> dict[str, Any]:
    limits = {"enum": list(option.choices) or None, "minimum": option.low, "maximum": option.high}
    described = {"type": option.type, "default": option.default, "description": option.help}
    return described | {name: value for name, value in limits.items() if value is not None}


def load() -> None:
    """Load what checks requests, so that the first one is not held for longer than its client prefers."""
    check(PlanRequest.parse(tiny_request()))


def warm_up(is_over: Callable[[], bool]) -> None:
    """Start a thread that loads the judge once nothing has to be compiled for it."""
    threading.Thread(target=_warm_up, args=(is_over,), name="warm-up", daemon=True).start()


def _warm_up(is_over: Callable[[], bool]) -> None:
    try:
        from penstock.planning.programs.lowered import lower
        from penstock.solvers.compiled.kept import all_kept

        time.sleep(LOOK_S)  # for whoever asks first
        while not all_kept():  # the forkserver has it compiled: here no request would be answered meanwhile
            if is_over():
                return
            time.sleep(LOOK_S)
        lower(PlanFile.parse(tiny_plan_file()))
        _keep_what_is_loaded()
    except PenstockError as error:
        log.warning("the judge could not be warmed up: %s", error)


def _keep_what_is_loaded() -> None:
    """Release loaded objects from garbage collection: each full one blocked answers for a tenth of a second."""
    gc.collect()
    gc.freeze()
