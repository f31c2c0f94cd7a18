"""Documents as the Python API takes them: by value, by file, or by the name of what is shipped."""

from __future__ import annotations

from pathlib import Path

from penstock.examples import catalogue
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology


def find_profile(given: str | Path | ModelProfile) -> ModelProfile:
    """Return a profile given by value, by file, or by the name of a shipped example."""
    if isinstance(given, ModelProfile):
        return given
    path = Path(given)
    return ModelProfile.read(path) if path.suffix or path.exists() else catalogue.profile(str(given))


def find_topology(given: str | Path | ClusterTopology) -> ClusterTopology:
    """Return a topology given by value, by file, or by the name of a shipped example (``8x8xH100``)."""
    if isinstance(given, ClusterTopology):
        return given
    path = Path(given)
    return ClusterTopology.read(path) if path.suffix or path.exists() else catalogue.cluster(str(given))
