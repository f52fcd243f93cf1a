"""Documents for training: tokenised once, packed by a plan that is written down, read back row by row."""
