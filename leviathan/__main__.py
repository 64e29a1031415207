"""`python -m leviathan` is the console script `leviathan`."""

from leviathan.cli import main

main()
