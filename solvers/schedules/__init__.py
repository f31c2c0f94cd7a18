"""Schedules: plain functions from a problem and an allocation to ``Orders``; ``catalogue.SCHEDULES`` lists them."""
