"""The needle-driven search for the critical dimension and the factors (paper, section 3.2)."""
