"""Planners: a paper's whole system each, allocation, schedule and loop; ``registry.PLANNERS`` lists them."""
