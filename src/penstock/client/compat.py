"""Old methods of the clients, each with its new name; they go in version ``GOES_IN``.

Until 0.1 a client had one flat list of methods. Both clients find the old ones here at run time; type checkers do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

GOES_IN = "0.2.0"

OLD_METHODS = {
    "plan": "plans.create",
    "programs": "plans.programs",
    "export": "plans.export",
    "validate": "plans.validate",
    "verify": "plans.verify",
    "simulate": "plans.simulate",
    "compare": "plans.compare",
    "explain": "plans.explain",
    "events": "jobs.events",
    "job": "jobs.get",
    "cancel": "jobs.cancel",
    "finish": "jobs.finish",
    "retry": "jobs.retry",
    "delete": "jobs.delete",
    "incumbent": "jobs.incumbent",
    "import_layout": "layouts.import_",
    "calibrate": "profiles.calibrate",
    "place": "placements.create",
    "sweep": "sweeps.create",
    "sweep_state": "sweeps.get",
    "delete_sweep": "sweeps.delete",
    "profile": "profiles.get",
    "topology": "topologies.get",
    "agents_topology": "topologies.of_agents",
    "import_topology": "topologies.import_",
    "run": "runs.create",
    "watch_run": "runs.watch",
    "run_state": "runs.get",
    "run_events": "runs.event_page",
    "run_story": "runs.events",
    "rank_log": "runs.log",
    "cancel_run": "runs.cancel",
    "trace": "runs.trace",
}


def _plan_file(client: Any, plan_or_job: str, *, best: bool = False) -> Any:
    if plan_or_job.startswith("sha256:"):
        return client.plans.file(plan_or_job)
    return client.jobs.plan_file(plan_or_job, best=best)


def _post(client: Any, document: Any) -> Any:
    return (client.profiles if document.kind == "profile" else client.topologies).create(document)


def _stop_sweep(client: Any, sweep_id: str, how: str = "cancel") -> Any:
    return (client.sweeps.finish if how == "finish" else client.sweeps.cancel)(sweep_id)


SPLIT_METHODS: dict[str, tuple[Callable[..., Any], str]] = {
    "plan_file": (_plan_file, "plans.file or jobs.plan_file"),
    "post": (_post, "profiles.create or topologies.create"),
    "stop_sweep": (_stop_sweep, "sweeps.cancel or sweeps.finish"),
}
"""Methods of which two became, with what calls the right one."""


class OldMethods:
    """A client that still has them."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in OLD_METHODS:
                _warn(name, OLD_METHODS[name])
                return attrgetter(OLD_METHODS[name])(self)
            if name in SPLIT_METHODS:
                call, new_names = SPLIT_METHODS[name]
                _warn(name, new_names)
                return lambda *args, **kwargs: call(self, *args, **kwargs)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class OldList:
    """A resource that was a method, which gave one page: ``client.jobs(limit=10)``."""

    if not TYPE_CHECKING:

        def __call__(self, **params: Any) -> Any:
            name = type(self).__name__.removeprefix("Async").lower()
            _warn(name, f"{name}.list or {name}.page")
            return self.page(**params)


def _warn(old: str, new: str) -> None:
    text = f"the client's method {old!r} goes in Penstock {GOES_IN}; call {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
