"""A lower bound on every plan of one contiguous pipeline, and the plans that it belongs to (BOUNDS part I).

``links`` are transfers and rings at their best over all placements, ``pieces`` the stages' times, ``search`` raises
the bound of one number of micro-batches, ``places`` turns what it found into plans. The kernel is
``kernels.request_labels``.
"""
