"""``python -m casewise``."""

from casewise.cli import main

main()
