"""What layers cost: measured with all devices busy, or computed without them.

May import: `schemas`, `executor`.
Start reading at `profiler.py` (measured), `analytic.py` (computed).
"""
