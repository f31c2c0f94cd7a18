"""The planner as a service: jobs, plans, runs and pages over HTTP.

May import: everything but `cli` and `executor`; torch never.
Start reading at `http/app.py`, then `jobs/submit.py`.
"""
