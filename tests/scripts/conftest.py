"""These tests import what lies in ``scripts/``."""

from __future__ import annotations

import sys

from scripts_path import SCRIPTS

sys.path.append(str(SCRIPTS))
