"""The device on which a rank computes: streams, copies, timers, memory, random state, precision.

May import: `schemas`, `executor.devices`.
Start reading at `interface.py`; `cpu.py` and `cuda.py` implement it, `opening.py` chooses.
"""
