"""Penstock's operations as functions on documents: solve, judge, lower, compare, explain, sweep.

May import: `schemas`, `convert`, `solvers`, `workers`.
Start reading at `solve.py`, then `answer.py` for people.
"""
