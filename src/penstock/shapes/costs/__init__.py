"""Costs of one GPU for each role of layer: times, storage and the collectives of its groups, in closed form.

May import: `penstock.shapes`, `schemas`, the table of devices of `executor.profiling`.

Start reading at `layers.py`; `pieces.py` has the parts of a block, `case.py` the shape and layout that are costed.
"""
