"""Commands around a service: serve, worker, agent, jobs, keys, db, doctor.

May import: `penstock.cli`, and everything else inside functions.
Start reading at `serving.py`.
"""
