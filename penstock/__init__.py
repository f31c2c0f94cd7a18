"""Penstock plans pipeline-parallel training: stages, devices and orders, with a proven bound."""
