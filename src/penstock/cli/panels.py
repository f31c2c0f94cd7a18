"""The panels that ``penstock --help`` shows the commands in."""

from __future__ import annotations

PLAN = "Plan"
MEASURE = "Measure"
RUN = "Run"
SERVICE = "Service"
CONVERT = "Convert"
