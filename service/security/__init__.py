"""Access control: keys, scopes, sessions, quotas.

May import: `service.settings`, `service.db`, `service.problems`; besides that what `service` may.
Start reading at `principals.py`, then `keys.py`.
"""
