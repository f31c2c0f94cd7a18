"""What Slurm writes and prints."""
