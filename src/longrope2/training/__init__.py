"""Mixed context window training (paper, section 3.3)."""
