"""A package per system: allocation, schedule and search of a paper; `catalogue.py` lists them.

May import: all of `solvers` below `solve`.
Start reading at `catalogue.py`, then `proposal.py`.
"""
