"""The verifier: checks a timeline from the problem alone, with none of the simulator's code.

May import: `solvers.model`, `solvers.costs`.
Start reading at `verifier.py`.
"""
