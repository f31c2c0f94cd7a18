"""Other trainers' layouts, in and out: Megatron-Core, torchtitan, DeepSpeed, and plain ranges of layers.

May import: `schemas`, `shapes`, `solvers`, `importers`, `examples`, `convert`.

Start reading at `drawn.py`, which has a layout's fields, then `megatron/`; `limits.py` checks what a trainer can
express.
"""
