"""The endpoints: each parses, calls, returns."""
