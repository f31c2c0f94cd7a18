"""Topologies from what schedulers, drivers and fabric tools print: each format gives facts, which are merged.

May import: `schemas`.
Start reading at `formats.py`, then `facts.py` and `merging/merge.py`.
"""
