"""``python -m casewise.cli``."""

from casewise.cli import main

main()
