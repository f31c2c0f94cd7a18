"""Reads objects of Kubernetes, and topograph's graph.

May import: `importers.cluster`, `schemas`.
Start reading at `kubernetes_nodes.py`.
"""
