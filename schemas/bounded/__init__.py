"""Reading of texts from outside within a budget, since a short text may stand for a very long one.

May import: `schemas.errors`.
Start reading at `budget.py`.
"""
