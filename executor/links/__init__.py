"""What links between processes and hosts carry."""
