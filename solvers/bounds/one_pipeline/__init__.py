"""Lower bounds on plans of every kind: several stages per device, replicas, any order of operations.

``load`` bounds every plan by its work, ``bound`` those of one pipeline by what devices must wait as well:
``slice_times`` are the layers' times at the sizes that slices of micro-batches may have, ``layer_costs`` what a layer
costs by how many devices hold it, ``crossings`` what has to go over a cut, ``layer_runs`` how many layers a device has
time for. The kernel is ``label_kernel``; ``bounds/coverage.py`` says which plans a bound covers.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `bound.py`.
"""
