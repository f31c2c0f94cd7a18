"""Reads what a node's own tools print: nvidia-smi, NCCL.

May import: `importers.cluster`, `schemas`.
Start reading at `nvidia_query.py`.
"""
