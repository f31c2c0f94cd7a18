"""Lower bounds on plans of every kind: several stages per device, replicas, any order of operations.

``load`` bounds every plan by its work, ``bound`` the plans of one pipeline also by the waiting of devices.
``slice_times`` has the layers' times at the possible sizes of slices, ``layer_costs`` the cost of a layer by the number
of devices that hold it, ``crossings`` the transfers over a cut, ``layer_runs`` the most layers that a device has time
for. The kernel is ``label_kernel``; ``bounds/coverage.py`` says which plans a bound covers.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `bound.py`.
"""
