"""MadPipe's allocations (sections 4.1 and 4.2): contiguous ones, and those with a special processor."""
