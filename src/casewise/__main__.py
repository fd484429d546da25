"""``python -m casewise``. Python then puts the working directory first on its path; it is removed, so that nothing is
imported from there."""

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()) and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from casewise.cli import main

main()
