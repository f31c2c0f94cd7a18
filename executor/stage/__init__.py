"""A stage on a rank: layers, backwards in one or two halves, optimizer, weight versions, reductions.

May import: `schemas`, `executor.run.job`, `executor.transport`.
Start reading at `held_stage.py`, then `stage_module.py`.
"""
