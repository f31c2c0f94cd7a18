"""Layers that several GPUs share: division by the job's styles, ranks that run them, traces on the meta device.

May import: `schemas`, `executor.profiling`, `executor.run`.
Start reading at `division.py`; `variants.py` makes the profile's costs, `tracer.py` runs the layers for them.
"""
