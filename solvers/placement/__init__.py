"""The choice of free hosts for a job: classes of sets that are alike in the network, and plans for sets that can win.

``site`` is the cluster as a tree, ``families`` the sets worth planning, ``regular`` a planner that needs no search,
``at_degrees`` the same where degrees are a choice. ``choice`` picks the sets of one job, ``joint`` shares hosts among
several jobs.

May import: `solvers.model`, `solvers.costs`, `solvers.degrees`, `solvers.bounds`,
`solvers.grid`, `solvers.planners`, `solvers.solve`.
Start reading at `choice.py`.
"""
