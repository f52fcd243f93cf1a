"""`python -m longrope2`, which torchrun needs."""

from longrope2.cli import main

main()
