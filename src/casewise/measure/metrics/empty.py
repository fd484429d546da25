"""What every metric gives when there is nothing to measure: the one table. NaN means undefined: exclude it, count it.

Nothing here is ever turned into 0 or 1 silently: a cohort mean skips NaN and says how many cases it skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from casewise.core.registry import Registry

NAN = float("nan")


@dataclass(frozen=True)
class Empty:
    """A metric's value where mask, label or both have no foreground; None where the usual formula applies."""

    both: float | None
    mask_only: float | None
    label_only: float | None
    why: str


EMPTY: Registry[Empty] = Registry(
    "metric",
    {
        "dice": Empty(NAN, 0.0, NAN, "classes absent from the label are skipped; none left is undefined"),
        "miou": Empty(None, None, None, "background is a class; NaN only if every voxel is ignored"),
        "hd95": Empty(NAN, NAN, NAN, "no surface, no distance: excluded and counted"),
        "assd": Empty(NAN, NAN, NAN, "no surface, no distance"),
        "surface_dice": Empty(NAN, 0.0, 0.0, "a surface with no counterpart is never within tolerance"),
        "boundary_iou": Empty(NAN, 0.0, 0.0, "a boundary with no counterpart overlaps nothing"),
    },
)


def value_if_empty(metric: str, *, mask_empty: bool, label_empty: bool) -> float | None:
    """The table's entry, or None if the metric's formula applies.

    >>> value_if_empty("surface_dice", mask_empty=True, label_empty=False)
    0.0
    """
    rule = EMPTY[metric]
    if mask_empty and label_empty:
        return rule.both
    if mask_empty:
        return rule.mask_only
    return rule.label_only if label_empty else None


def empty_table() -> str:
    """The table as Markdown, as the reference page prints it."""
    rows = ["| metric | both empty | mask empty | label empty | why |", "|---|---|---|---|---|"]
    for name, rule in EMPTY.items():
        cells = (rule.both, rule.mask_only, rule.label_only)
        rows.append(f"| `{name}` | {' | '.join(_cell(value) for value in cells)} | {rule.why} |")
    return "\n".join(rows)


def _cell(value: float | None) -> str:
    if value is None:
        return "as usual"
    return "NaN" if value != value else f"{value:g}"
