"""How numba compiles our kernels and passes what they read, and the heap that several of them share.

May import: nothing of `solvers`.
Start reading at `decorators.py`.
"""
