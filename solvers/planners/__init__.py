"""Planners: a paper's whole system each, allocation, schedule and loop; ``catalogue.PLANNERS`` lists them."""
