"""The command line; every command imports what it needs when it runs.

May import: `schemas.errors` at import time; everything else inside functions.
Start reading at `main.py`; the commands are in `plan/`, `measure/`, `run/`, `service/`, `convert/`.
"""
