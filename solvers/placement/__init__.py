"""Which free hosts a job should get: classes of sets that are alike in the network, plans for those that can win.

``site`` is the cluster as a tree, ``families`` the sets worth looking at, ``regular`` a planner that needs no search,
``at_degrees`` the same where degrees are a choice, ``choice`` picks the sets of one job, ``joint`` shares hosts among
several.

May import: `solvers.model`, `solvers.costs`, `solvers.degrees`, `solvers.bounds`,
`solvers.grid`, `solvers.planners`, `solvers.solve`.
Start reading at `choice.py`.
"""
