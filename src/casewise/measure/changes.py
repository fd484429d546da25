"""Records of a comparison of an old and a new mask: one label, one region that became worse, one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casewise.core.text import brief

NOTABLE = 0.01  # pieces and holes below this share of their label are counted without a warning
_DISAGREE = 0.5  # a warning is given if 1 - Dice between old and new is above this
NAN = float("nan")


@dataclass(frozen=True)
class LabelChange:
    """One label of one case, old and new. None: not requested, or no label was given; NaN: undefined."""

    label: int
    voxels_old: int
    voxels_new: int
    changed: int  # voxels that are this label in exactly one of the two
    components_old: int
    components_new: int
    components_gained: int  # pieces of the new mask that touch nothing of this label in the old one
    components_lost: int
    holes_old: int
    holes_new: int
    holes_gained: int  # holes of the new mask that touch no hole of this label in the old one
    holes_lost: int
    largest_gained: int = 0  # voxels of the largest piece gained, of the largest lost, of the largest hole gained
    largest_lost: int = 0
    largest_hole: int = 0
    volume_old_ml: float | None = None  # None without a spacing, and in pictures
    volume_new_ml: float | None = None
    voxels_label: int | None = None  # None without a label
    volume_label_ml: float | None = None
    shift_hd95: float | None = None  # between the old and the new surface, mm or voxels; NaN if one is empty
    shift_assd: float | None = None
    dice_old: float | None = None
    dice_new: float | None = None
    ha: float | None = None
    ba: float | None = None
    hd95_old: float | None = None
    hd95_new: float | None = None

    @property
    def drift(self) -> float:
        """(new - old) / old in voxels, with its sign; NaN where the old mask has none of this label."""
        return (self.voxels_new - self.voxels_old) / self.voxels_old if self.voxels_old else NAN

    @property
    def drift_ml(self) -> float | None:
        """New minus old volume."""
        if self.volume_old_ml is None or self.volume_new_ml is None:
            return None
        return self.volume_new_ml - self.volume_old_ml

    def share(self, voxels: int) -> float:
        """Return voxels divided by the size of this label in the mask that has more of it; 0 if neither has any."""
        return voxels / max(self.voxels_old, self.voxels_new, 1)

    @property
    def suspicion(self) -> float:
        """Suspicion of this label, in [0, 1]: the largest piece gained or lost or hole gained,
        as a share of the label and from ``NOTABLE`` on; 1 - agreement, where that is more than a half; 1 for a label
        that came or went."""
        if not self.voxels_old or not self.voxels_new:
            return float(self.voxels_old != self.voxels_new)
        largest = self.share(max(self.largest_gained, self.largest_lost, self.largest_hole))
        apart = 1 - self.agreement
        return max(min(largest, 1.0) if largest >= NOTABLE else 0.0, apart if apart > _DISAGREE else 0.0)

    @property
    def agreement(self) -> float:
        """Dice between old and new; NaN if both are empty."""
        both = self.voxels_old + self.voxels_new
        return (both - self.changed) / both if both else NAN

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "drift": self.drift, "drift_ml": self.drift_ml, "agreement": self.agreement}


@dataclass(frozen=True)
class Regression:
    """A region of the change with more wrong voxels than before: where it is and how large."""

    voxels: int
    worse: int  # voxels made wrong minus voxels made right
    low: tuple[int, ...]  # first index inside its box, per axis of the mask
    high: tuple[int, ...]  # first index beyond it
    ml: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The new mask of one case against the old one; the fields after ``labels`` need a label and are None without."""

    voxels: int  # voxels of the whole mask
    changed: int  # |D|: voxels whose label differs (foreground from background only, if asked so)
    changed_share: float  # changed voxels by those that are foreground in old or new; 0 if there are none
    regions: int  # components of D of at least min_area voxels
    largest: int  # voxels of the largest component of D
    labels: tuple[LabelChange, ...]
    spacing_known: bool = False
    voxel_ml: float | None = None  # None without a spacing, and in pictures
    labelled: bool = False
    metric: str = "dice"
    metric_old: float | None = None
    metric_new: float | None = None
    ha: float | None = None
    ba: float | None = None
    unscored: float | None = None
    made_wrong: int | None = None  # voxels right in the old mask and wrong in the new one
    made_right: int | None = None
    regressions: tuple[Regression, ...] = field(default=())  # the largest harmful regions

    __repr__ = brief

    @property
    def delta(self) -> float:
        """Changed voxels by all voxels."""
        return self.changed / self.voxels

    @property
    def change(self) -> float:
        """metric(new) - metric(old); NaN without a label."""
        if self.metric_old is None or self.metric_new is None:
            return NAN
        return self.metric_new - self.metric_old

    @property
    def worse_voxels(self) -> float | None:
        """Share of the changed voxels that were right and are wrong now; None without a label."""
        return None if self.made_wrong is None else self.made_wrong / max(self.changed, 1)

    @property
    def suspicion(self) -> float:
        """Suspicion of the most suspicious label; 0 if there is nothing to check. Needs no label."""
        return max((row.suspicion for row in self.labels), default=0.0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to check the case, as sentences; needs no label."""
        return self.warned()

    def warned(self, names: Mapping[int, str] | None = None) -> tuple[str, ...]:
        """Return the warnings with names for labels."""
        return tuple(word for row in self.labels if row.suspicion for word in _warnings(row, names or {}))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, properties included."""
        return {
            **vars(self),
            "labels": [row.as_dict() for row in self.labels],
            "regressions": [
                {**vars(region), "low": [*region.low], "high": [*region.high]} for region in self.regressions
            ],
            "delta": self.delta,
            "change": self.change,
            "worse_voxels": self.worse_voxels,
            "warnings": list(self.warnings),
        }


def label_name(label: int, names: Mapping[int, str]) -> str:
    """Return the name and number of a label, or its number if it has no name.

    >>> label_name(1, {1: "LV"}), label_name(2, {1: "LV"})
    ('LV (1)', 'label 2')
    """
    return f"{names[label]} ({label})" if label in names else f"label {label}"


def _warnings(row: LabelChange, names: Mapping[int, str]) -> list[str]:
    name, found = label_name(row.label, names), []
    if not row.voxels_new:
        return [f"{name} is gone"]
    if not row.voxels_old:
        return [f"{name} is new"]
    for count, largest, one, many in (
        (row.holes_gained, row.largest_hole, "hole", "holes"),
        (row.components_lost, row.largest_lost, "piece lost", "pieces lost"),
        (row.components_gained, row.largest_gained, "piece gained", "pieces gained"),
    ):
        if row.share(largest) >= NOTABLE:
            said = f"1 {one}, " if count == 1 else f"{count} {many}, the largest "
            found.append(f"{name}: {said}{100 * row.share(largest):.1f} % of it")
    if row.changed and row.agreement < 1 - _DISAGREE:
        found.append(f"{name}: Dice of old with new is only {row.agreement:.2f} (Dice)")
    return found
