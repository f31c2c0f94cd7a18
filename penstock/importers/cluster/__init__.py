"""Topologies from what schedulers, drivers and fabric tools print: each format says facts, which are then merged."""
