"""Who may do what: keys, scopes, sessions, quotas.

May import: `service.db`, `schemas`.
Start reading at `principals.py`, then `keys.py`.
"""
