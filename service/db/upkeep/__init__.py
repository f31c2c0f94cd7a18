"""Keeps a database in order: checks, backups, removal of what is no longer needed.

May import: `service.db`, `schemas`.
Start reading at `checking.py`.
"""
