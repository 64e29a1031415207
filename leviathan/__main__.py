"""Entry point of `python -m leviathan`, equal to the command `leviathan`."""

from leviathan.cli import main

main()
