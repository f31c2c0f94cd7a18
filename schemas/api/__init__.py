"""Documents that only the service, its clients and agents exchange.

May import: `schemas`.
Start reading at `jobs.py`.
"""
