"""Completions in the shell: shipped models and clusters, planners, schedules (`penstock --install-completion`)."""

from __future__ import annotations

from typing import get_args

KINDS_OF_CLUSTERS = ("1x8xH100", "8x8xH100", "4x8xA100", "2x4xV100")
"""Examples of clusters by the form NODESxDEVICESxKIND, whose names cannot be listed."""


def models(incomplete: str) -> list[str]:
    """Return the models that have a profile by name."""
    from penstock.examples.catalogue import profile_names

    return _starting(profile_names(), incomplete)


def shapes(incomplete: str) -> list[str]:
    """Return the transformers whose shape is known."""
    from penstock.examples.shapes import SHAPES

    return _starting(tuple(SHAPES), incomplete)


def clusters(incomplete: str) -> list[str]:
    """Return the shipped topologies, and examples of names by the form NODESxDEVICESxKIND."""
    from penstock.examples.catalogue import cluster_names

    return _starting((*cluster_names(), *KINDS_OF_CLUSTERS), incomplete)


def planners(incomplete: str) -> list[str]:
    """Return the planners of this installation."""
    from penstock.solvers.planners.catalogue import PLANNERS

    return _starting(tuple(PLANNERS), incomplete)


def schedules(incomplete: str) -> list[str]:
    """Return the schedules of this installation, and auto."""
    from penstock.solvers.schedules.catalogue import SCHEDULES

    return _starting(("auto", *SCHEDULES), incomplete)


def lists(incomplete: str) -> list[str]:
    """Return the kinds of names for which ``penstock list`` has a list."""
    from penstock.schemas.api.listing import Listable

    return _starting(get_args(Listable), incomplete)


def _starting(names: tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
