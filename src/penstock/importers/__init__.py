"""Readers of other programs' files.

May import: `schemas`.
Start reading at `topology.py`; `cluster/` for what clusters print.
"""
