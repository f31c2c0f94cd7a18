"""The models of the papers' tables that Penstock does not ship, by name, with their profiles. Loads no torch.

``scripts/make-example-profiles`` computes the profiles; ``profile`` also returns profiles of shipped models.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from penstock.examples import catalogue
from penstock.examples.models import FEW, MANY, Model
from penstock.schemas.profile import ModelProfile

PROFILES = Path(__file__).parent / "profiles"

MODELS: dict[str, Model] = {
    "xlnet-36": Model("paper_models.xlnet:xlnet_36", "fp32", FEW),
    "gnmt-16": Model("paper_models.gnmt:gnmt_16", "fp32", MANY),
    "awd-lstm": Model("paper_models.awd_lstm:job", "fp32", MANY),
    "vgg-19": Model("paper_models.vgg:vgg_19", "fp32", MANY),
    "inception-v3": Model("paper_models.inception:job", "fp32", MANY),
    "densenet-121": Model("paper_models.densenet:densenet_121", "fp32", MANY),
    "amoebanet-36": Model("paper_models.amoebanet:amoebanet_36", "fp32", FEW),
}


@lru_cache(maxsize=16)
def profile(name: str) -> ModelProfile:
    """Return the profile of a paper's model, or of a shipped one. Raises UnknownName as ``catalogue.profile`` does."""
    return ModelProfile.read(PROFILES / f"{name}.json") if name in MODELS else catalogue.profile(name)
