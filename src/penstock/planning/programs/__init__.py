"""Plans as programs of ranks: lowered, for a run with its segments, or bundled with what a launcher needs.

May import: what `planning` may.
Start reading at `lower.py`.
"""
