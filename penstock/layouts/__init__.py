"""Other trainers' layouts, out and in: Megatron-Core, torchtitan, DeepSpeed, and plain ranges of layers."""
