"""A simulated CUDA for tests: what a GPU runtime asks of its device, written down and checked without a GPU.

Numbers are computed on the CPU, at once. Besides, each rank keeps a *log* of what its host asked for, in order
(`entries.py`), and `engine.py` decides whether devices could do what the logs of all ranks ask: with streams on
hardware queues, kernels of communicators that occupy part of the device until their peers come, and hosts that wait.
While a log is written, `ordering.py` finds accesses to memory that nothing orders, and `allocator.py` counts bytes as
torch's allocator does. It is a model: docs/extending.md says what it leaves out.

Start reading at `entries.py`; `ranks.py` runs the product's ranks on it.
"""
