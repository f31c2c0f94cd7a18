"""Measurements of the links between processes and hosts.

May import: `schemas`, `executor.interfaces`.
Start reading at `link_peer.py` for hosts, `link_probe.py` for processes of one host.
"""
