"""Solver processes: a fork server, its children and the protocol between them.

May import: `schemas`, `solvers`, `planning`.
Start reading at `forkserver.py`, then `solve_child.py`.
"""
