"""``python -m twinscope`` is the command ``twinscope``."""

from twinscope.cli import main

main()
