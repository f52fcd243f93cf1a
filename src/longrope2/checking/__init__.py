"""Anyone's model held against its own config: what each engine makes of it, and what is wrong with it."""
