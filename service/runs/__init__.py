"""Training runs on agents: generations, recovery, replanning, placement of ranks.

May import: `service.db`, `service.security`, `service.jobs`; besides that what `service` may.
Start reading at `runs.py`.
"""
