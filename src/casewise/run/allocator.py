"""Keep freed memory in the process, so that long runs do not pay the kernel for the same pages again and again.

An episode allocates and frees the same large activations at every forward. By default glibc maps each of them anew and
the kernel clears every page first. Two of glibc's settings change that: ``M_MMAP_MAX = 0`` takes large blocks from the
heap, and ``M_TRIM_THRESHOLD = -1`` never gives the heap's end back. Results do not change, the process stays as large
as its largest case. ``CASEWISE_KEEP_MEMORY=0`` leaves the allocator alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

SWITCH = "CASEWISE_KEEP_MEMORY"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt(3)
_INHERITED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def keep_freed_memory() -> bool:
    """Set this process's allocator, and by environment that of workers it will start; whether that was done.

    Only on Linux with glibc, only unless ``CASEWISE_KEEP_MEMORY=0``. Settings in the environment are left as they are.
    """
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    if any(name in os.environ for name in _INHERITED):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))
    os.environ.update(_INHERITED)
    return done
