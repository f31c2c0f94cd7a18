"""How numba compiles our kernels, and the heap that several of them share.

May import: nothing of `solvers`.
Start reading at `decorators.py`.
"""
