"""Objects of Kubernetes, and the graph of topograph."""
