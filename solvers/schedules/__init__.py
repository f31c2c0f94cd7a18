"""Schedules: plain functions from a problem and an allocation to ``Orders``; ``registry.SCHEDULES`` lists them."""
