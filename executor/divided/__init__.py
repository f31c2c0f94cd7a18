"""Layers that several GPUs share: divided as jobs say, run by ranks, and traced on the meta device without any.

May import: `schemas`, `executor.profiling`, `executor.run`.
Start reading at `division.py`; `variants.py` makes the profile's costs, `tracer.py` runs the layers for them.
"""
