"""Models as ordered layers with shipped analytic profiles, and clusters by name; `catalogue` needs no torch."""
