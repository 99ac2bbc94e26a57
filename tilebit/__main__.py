"""``python -m tilebit``: the ``tilebit`` command."""

from .command.cli import main

if __name__ == "__main__":
    main()
