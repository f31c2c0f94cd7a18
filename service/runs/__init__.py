"""Training runs on agents: generations, recovery, replanning, placement of ranks.

May import: `service.db`, `service.jobs`, `schemas`.
Start reading at `runs.py`.
"""
