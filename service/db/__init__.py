"""The database: engine, tables, migrations, notifications, document store, upkeep.

May import: `schemas`, `service.settings`.
Start reading at `database.py`.
"""
