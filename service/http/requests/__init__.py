"""How requests come in and answers go out: bodies, access, idempotency, events, child processes.

May import: `service`, `schemas`.
Start reading at `bodies.py`.
"""
