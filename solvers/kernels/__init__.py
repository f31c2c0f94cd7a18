"""Compiled inner loops of the judge on plain arrays; their slow twins are the tests' oracles."""
