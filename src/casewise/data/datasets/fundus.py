"""What the fundus datasets share: classes, and the grey code of REFUGE that others took over."""

from __future__ import annotations

import numpy as np

from casewise.core.records import Mask
from casewise.data.datasets.label_files import grey
from casewise.data.datasets.located import Found

CLASSES = ("background", "disc rim", "cup")


def cup_and_rim(values: Mask) -> Mask:
    """REFUGE's greys 0 cup, 128 rim, 255 background as 2, 1, 0: cup at most 100, disc at most 150.

    >>> cup_and_rim(np.array([0, 128, 255])).tolist()
    [2, 1, 0]
    """
    return ((values <= 150).astype(np.uint8) + (values <= 100)).astype(np.uint8)


def grey_label(found: Found) -> Mask:
    """The label of a case whose mask is in REFUGE's grey code."""
    return cup_and_rim(grey(found.labels[0]))
