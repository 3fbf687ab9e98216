"""`python -m lightning_sparsecomm`: the command `sparsecomm`, where it is not on the path."""

from lightning_sparsecomm.commands import main

main()
