"""Lower bounds on plans of every kind: several stages per device, replicas, any order of operations.

``load`` bounds every plan by its work, ``bound`` those of one pipeline also by what devices must wait for:
``slice_times`` has the layers' times at the sizes that slices of micro-batches may have, ``layer_costs`` the cost of a
layer by the number of devices that hold it, ``crossings`` the transfers over a cut, ``layer_runs`` how many layers a
device has time for. The kernel is ``label_kernel``; ``bounds/coverage.py`` says which plans a bound covers.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `bound.py`.
"""
