"""Allocators: plain functions from a problem to ``Allocation``; ``registry.ALLOCATORS`` lists them."""
