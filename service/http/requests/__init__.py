"""Requests and answers over HTTP: bodies, access, idempotency, events, child processes.

May import: `service`, `schemas`.
Start reading at `bodies.py`.
"""
