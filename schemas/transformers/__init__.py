"""Documents about transformers: their shape, and the degrees of parallelism that share their layers.

May import: `schemas`.
Start reading at `shape.py`, then `degrees.py`.
"""
