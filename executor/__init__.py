"""Runs lowered programs on torch.distributed, and measures them."""
