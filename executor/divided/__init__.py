"""Layers that several GPUs share, traced on the meta device without any: costs of a job at tensor degrees.

May import: `schemas`, `executor.profiling`, `executor.run`.
Start reading at `variants.py`, which makes the profile's; `tracer.py` runs the layers.
"""
