"""What all tests can use."""

from browser import browser

__all__ = ["browser"]
