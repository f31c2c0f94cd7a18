"""Plan jobs: from a submitted request through queue, lease and worker to the stored answer.

May import: `service.db`, `schemas`, `penstock.workers`.
Start reading at `submit.py`, `queue.py`, `worker.py`, in this order.
"""
