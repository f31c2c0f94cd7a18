"""Lower bounds on plans of every kind: several stages per device, replicas, any order of operations.

``load`` bounds every plan by its work. ``search`` bounds those of one pipeline by what devices must wait as well:
``slices`` are the layers' times at the sizes that slices of micro-batches may have, ``options`` what a layer costs by
how many devices hold it, ``crossings`` what has to go over a cut, ``runs`` how many layers a device has time for. The
kernel is ``kernels.all_plans``; ``kinds`` says of which plans a bound speaks.

May import: `solvers.model`, `solvers.costs`, `solvers.bounds`, `solvers.compiled`.
Start reading at `bound.py`.
"""
