"""What tests compare the measures with."""

from __future__ import annotations

import numpy as np

from casewise.measure.metrics.harm import harm


def harm_by_class(source, adapted, label, *, ignore=None, **options):
    """Harm of each foreground class against everything else, one binary mask after the other."""
    held = {int(c) for mask in (source, adapted, label) for c in np.unique(mask)} - {0, ignore}
    void = 0 if ignore is None else 2 * (label == ignore)  # 0 another class, 1 this class, 2 ignored
    return {c: harm(source == c, adapted == c, (label == c) + void, ignore=2, **options) for c in sorted(held)}
