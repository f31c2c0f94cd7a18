"""A run from job and program to its last step: ranks, training loop, checks, traces, local processes.

May import: `schemas` and the other rooms of `executor`.
Start reading at `rank_main.py`; `local.py` starts ranks on this machine.
"""
