"""Models, profiles and clusters by name; samples of what clusters print; schedulers that ask Penstock.

May import: `executor` (jobs), `schemas`; `catalogue.py` needs no torch.
Start reading at `catalogue.py`.
"""
