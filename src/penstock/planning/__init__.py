"""Penstock's operations as functions on documents: solve, judge, lower, compare, explain, sweep, fits.

May import: `schemas`, `convert`, `shapes`, `solvers`, `workers`.
Start reading at `solve.py`, then `answer.py` for people.
"""
