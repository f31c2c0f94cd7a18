"""The endpoints: each parses, calls, returns.

May import: `service`, `schemas`.
Start reading at `plans.py`.
"""
