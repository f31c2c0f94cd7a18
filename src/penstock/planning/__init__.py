"""Penstock's operations as functions on documents: solve, judge, compare, explain, fits, and programs of ranks.

May import: `schemas`, `shapes`, `solvers`, `executor`, `examples`, `convert`, `layouts`.
Start reading at `solve.py`, then `judge.py`.
"""
