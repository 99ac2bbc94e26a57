"""``python -m tilebit``: the ``tilebit`` command."""

from .command.cli import main

main()
