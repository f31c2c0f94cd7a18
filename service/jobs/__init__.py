"""Plan jobs: from a submitted request through queue, lease and worker to the stored answer.

May import: `service.settings`, `service.logs`, `service.metrics`, `service.db`, `service.problems`,
`service.parsing`, `service.security`; besides that what `service` may.
Start reading at `submit.py`, `queue.py`, `worker.py`, in this order.
"""
