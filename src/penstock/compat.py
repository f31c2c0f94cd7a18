"""Old forms of the Python API, each accepted until the version in which it is removed.

May import: nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping

OLD_FORMS = {"plan(termination={…})": ("time_limit, max_plans, effort and gap", "0.3")}
"""Old form: what replaces it, and the version in which it is removed."""


def merged_limits(termination: Mapping[str, object] | None, limits: Mapping[str, object]) -> dict[str, object] | None:
    """Merge the old ``termination`` argument with the limits given by name; None where neither says anything."""
    return {**(termination or {}), **limits} or None
