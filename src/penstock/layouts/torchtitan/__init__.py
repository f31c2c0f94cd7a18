"""torchtitan's configurations, in and out.

May import: `penstock.layouts`, `schemas`.

Start reading at `torchtitan.py`.
"""
