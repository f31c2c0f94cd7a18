"""The device that a rank computes on: streams, copies, timers, memory, random state, precision.

May import: `schemas`, `executor.devices`.
Start reading at `interface.py`; `cpu.py` and `cuda.py` are the two that ship, `opening.py` chooses.
"""
