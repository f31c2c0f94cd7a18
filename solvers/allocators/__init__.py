"""Allocators: plain functions from a problem to ``Allocation``."""
