"""Texts from outside that stand for more than they say: read within a budget.

May import: `schemas.errors`.
Start reading at `budget.py`.
"""
