"""Other trainers' layouts, in and out: Megatron-Core, torchtitan, DeepSpeed, and plain ranges of layers.

May import: `schemas`, `convert`, `planning`, `solvers`.
Start reading at `importing.py` and `exporting.py`; `limits.py` says what each trainer can express.
"""
