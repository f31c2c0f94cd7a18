"""What a node's own tools print: nvidia-smi, NCCL."""
