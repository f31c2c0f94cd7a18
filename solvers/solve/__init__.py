"""Answers a request: rounds of tasks, done by workers, of which the best plan and the proofs are kept.

May import: every room of `solvers` but `placement`.
Start reading at `driver.py`.
"""
