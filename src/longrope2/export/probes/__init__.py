"""Scripts that run an engine in a process of its own, and in its own environment: they import nothing of ours."""
