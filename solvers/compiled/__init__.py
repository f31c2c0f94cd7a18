"""The compilation of our kernels by numba, the passing of their arguments, and the heap that several of them share.

May import: nothing of `solvers`.
Start reading at `decorators.py`.
"""
