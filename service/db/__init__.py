"""The database: engine, tables, migrations, notifications, document store, upkeep.

May import: `service.settings`, `service.metrics`; besides that what `service` may.
Start reading at `database.py`.
"""
