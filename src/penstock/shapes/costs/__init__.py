"""What one GPU does for each role of layer: times, storage and the collectives of its groups, in closed form.

May import: `penstock.shapes`, `schemas`, the table of devices of `executor.profiling`.
Start reading at `layers.py`; `pieces.py` has what a block is made of, `case.py` what is asked.
"""
