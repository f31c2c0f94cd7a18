"""These tests import what lies in ``scripts/`` and ``benchmarks/``."""

from __future__ import annotations

import sys

from repository import ROOT
from scripts_path import SCRIPTS

sys.path[:0] = [str(SCRIPTS), str(ROOT / "benchmarks")]
