"""The costs of layers: measured with all devices busy, or computed without devices.

May import: `schemas`, `executor`.
Start reading at `profiler.py` (measured), `analytic.py` (computed).
"""
