"""Upkeep of a database: checks, backups, removal of data that is no longer needed.

May import: `service.db`, `schemas`.
Start reading at `checking.py`.
"""
