r"""Appearance of images for a model, in a few label-free numbers: is a new image of the kind that was calibrated on?

A policy and its promises hold for cases that are exchangeable with the calibration cases. Images of another modality
or protocol are not. Three questions are answered here, none of them with a label:

- :func:`outside`: is one image outside the range of the calibration patients?
- :func:`folder_differs`: do the patients of a folder look unlike the calibration patients, as a group?
- :func:`known_appearance`: the numbers of the calibration patients, small enough to be stored with a policy.

The patient is the unit. Each number :math:`x` of an image is compared with :math:`n` calibration patients, mean
:math:`m` and standard deviation :math:`s`:

.. math:: t = |x - m| \,/\, s \sqrt{1 + 1/n}

An image is outside if its largest t exceeds the Student quantile for :math:`\alpha = 0.01` over all numbers
(Bonferroni) and also the largest t that any calibration patient has against all others, the new image included. The
second condition is full conformal prediction: whatever the distribution, at most one in :math:`n + 1` images of the
same kind is outside. A folder is judged by a permutation test over patients with the energy distance (Székely and Rizzo
2013), which is exact for any number of patients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from casewise.core.errors import BadInput
from casewise.core.json_records import from_plain
from casewise.core.records import SOURCE, Action, Decision, Mask
from casewise.core.text import UNIT, pluralize

ALPHA = 0.01
"""Share of images like the calibration images that :func:`outside` reports if numbers are normal; at most 1/(n + 1)."""

MOST_PERMUTATIONS = 4999
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_SAMPLES = 100_000  # values of a channel that are looked at
_FLOORS = {"intensity": 0.05, "texture": 0.02, "spacing": 0.05, "share": 0.1, "brightness": 0.1, "agreement": 0.02}
"""Smallest standard deviation of each kind of number: smaller differences mean nothing, even where none was seen."""


@dataclass(frozen=True)
class Appearance:
    """Label-free numbers that describe one image.

    Args:
        case_id: Name of the case.
        numbers: Finite numbers by name, as :func:`appearance_numbers` measures them.
        cluster: Patient or sequence; None if the case counts as one patient.
    """

    case_id: str
    numbers: Mapping[str, float]
    cluster: str | None = None

    @property
    def modality(self) -> str | None:
        """The modality in the header ("MR", "CT"), or None."""
        return next((name.removeprefix(MODALITY) for name in self.numbers if name.startswith(MODALITY)), None)

    @property
    def patient(self) -> str:
        """The patient or sequence that the case counts for."""
        return self.cluster or self.case_id

    def with_agreement(self, agreement: float | None) -> Appearance:
        """Add the agreement of the views or members of the case, if it is known."""
        return self if agreement is None else replace(self, numbers={**self.numbers, AGREEMENT: float(agreement)})


@dataclass(frozen=True)
class KnownAppearance:
    """Appearances of the calibration patients; plain data, stored with a policy or a deployment.

    Args:
        names: The numbers that every calibration case has.
        patients: One row of numbers for each patient: those of its first case.
        modalities: Modalities that headers named; empty where none did.
    """

    names: tuple[str, ...]
    patients: tuple[tuple[float, ...], ...]
    modalities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.patients) < 2:
            raise BadInput(f"the appearance of a cohort needs at least 2 {UNIT[1]}, got {len(self.patients)}")
        if any(len(row) != len(self.names) for row in self.patients):
            raise BadInput(f"an appearance has one value for each of its {len(self.names)} numbers; calibrate again")
        values = itertools.chain.from_iterable(self.patients)
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in values):
            raise BadInput("the numbers of an appearance must be finite; calibrate again")

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> KnownAppearance:
        """Read plain JSON types.

        Raises:
            BadInput: If a field is missing or has another type.
        """
        return from_plain(cls, plain, "the appearance of calibration cases", "calibrate again")


def appearance_numbers(
    inputs: NDArray[Any], *, image: NDArray[Any] | None = None, source: Mask | None = None, labels: Sequence[int] = (),
    spacing_mm: Sequence[float] | None = None, modality: str | None = None,
) -> dict[str, float]:  # fmt: skip
    r"""Compute the label-free numbers that describe an image.

    Per channel of the prepared input: mean, standard deviation, quantiles and texture, the last two in units of the
    standard deviation, so that they do not depend on the scale of the image. Texture is the mean absolute difference
    of neighbors along the last axis. Per label of M0: its share of the image (:math:`\log_{10}(share + 10^{-4})`) and
    its brightness, the mean of the raw first channel inside it in units of that channel's standard deviation.

    Args:
        inputs: Prepared input, ``(n, channel, *space)``, after the backbone's own preprocessing.
        image: Raw image ``(channel, *space)`` on the grid of ``source``, for the brightness of labels.
        source: M0, on the grid of the image.
        labels: Foreground values of M0 that are counted.
        spacing_mm: Voxel size per axis of the case.
        modality: Modality in the header of the image, such as "MR".

    Returns:
        Finite numbers by name. Numbers that cannot be computed are left out, such as the brightness of an absent label.

    Example:
        >>> found = appearance_numbers(np.arange(16.0).reshape(1, 1, 4, 4), spacing_mm=(1.0, 1.0))
        >>> round(found["intensity mean of channel 0"], 2), found["spacing of axis 0"]
        (7.5, 0.0)
    """
    if inputs.ndim < 3 or not inputs.size:
        raise BadInput(f"inputs must be (n, channel, *space) with at least one value, got shape {inputs.shape}")
    found: dict[str, float] = {f"{MODALITY}{modality}": 1.0} if modality else {}
    for channel in range(inputs.shape[1]):
        whole = np.asarray(inputs[:, channel], dtype=np.float64)
        values = whole.ravel()[:: max(1, whole.size // _SAMPLES)]
        mean, sd = float(values.mean()), float(values.std())
        found[f"intensity mean of channel {channel}"] = mean
        found[f"intensity deviation of channel {channel}"] = sd
        if sd > 0:
            levels = (np.quantile(values, QUANTILES) - mean) / sd
            found |= {
                f"intensity quantile {q:g} of channel {channel}": float(v)
                for q, v in zip(QUANTILES, levels, strict=True)
            }
            found[f"texture of channel {channel}"] = float(np.abs(np.diff(whole, axis=-1)).mean()) / sd
    for axis, size in enumerate(spacing_mm or ()):
        if size > 0:
            found[f"spacing of axis {axis}"] = math.log(size)
    if source is not None:
        found |= _of_labels(source, labels, image)
    return {name: round(value, 6) for name, value in found.items() if math.isfinite(value)}


OF_LABELS = ("share of label", "brightness of label")
"""First words of the numbers that are computed from M0: unusual values mean that M0 may have failed."""
SMALL_SHARE = 1e-4
"""Added to a share before its logarithm is taken, so that an absent label has a number too."""
AGREEMENT = "agreement"
"""How far the deployed mask agrees with the other candidates; where it is low, the mask may have failed."""
MODALITY = "modality "
"""Beginning of the name of the number that stands for the modality in a header; the number is always 1."""


def _of_labels(source: Mask, labels: Sequence[int], image: NDArray[Any] | None) -> dict[str, float]:
    found = {}
    raw = None if image is None or image.shape[1:] != source.shape else np.asarray(image[0], dtype=np.float64)
    mean, sd = (0.0, 0.0) if raw is None else (float(raw.mean()), float(raw.std()))
    for label in labels:
        inside = source == label
        found[f"{OF_LABELS[0]} {label}"] = math.log10(float(inside.mean()) + SMALL_SHARE)
        if raw is not None and sd > 0 and inside.any():
            found[f"{OF_LABELS[1]} {label}"] = (float(raw[inside].mean()) - mean) / sd
    return found


def known_appearance(cases: Sequence[Appearance]) -> KnownAppearance:
    """Summarize the appearances of the calibration patients.

    Args:
        cases: Appearances of all calibration cases. Numbers that some case lacks are left out; the first case of each
            patient, by its name, stands for the patient.

    Returns:
        One row for each patient.

    Raises:
        BadInput: If there are fewer than two patients.
    """
    held = [name for name in cases[0].numbers if not name.startswith(MODALITY)] if cases else []
    names = tuple(name for name in held if all(name in one.numbers for one in cases))
    firsts = _first_cases(cases)
    rows = tuple(tuple(float(one.numbers[name]) for name in names) for one in firsts)
    return KnownAppearance(names, rows, tuple(sorted({one.modality for one in cases if one.modality})))


def outside(appearance: Appearance, known: KnownAppearance, *, image_only: bool = False) -> list[str]:
    """Name the numbers in which one image is outside the range of the calibration patients.

    With n patients, at most one in n + 1 images of the calibration kind is named, and about :data:`ALPHA` where numbers
    are normal. An image that is not named may still be of another kind: a few patients show little. Agreement is
    tested separately in the same way, and only low agreement counts, so together the tests name up to twice as many.

    Args:
        appearance: The image. Numbers that it lacks are passed over.
        known: Appearances of the calibration patients.
        image_only: Leave out the numbers that are computed from masks (see :func:`_of_labels`).

    Returns:
        One sentence per number, farthest first; none where the image fits.
    """
    said = []
    if appearance.modality and known.modalities and appearance.modality not in known.modalities:
        of = " and ".join(known.modalities)
        said.append(f"its modality is {appearance.modality}, the labelled images are {of}")
    places = [place for place, name in enumerate(known.names) if name in appearance.numbers]
    by_itself = [place for place in places if known.names[place] == AGREEMENT]
    said += _beyond(appearance, known, [place for place in places if place not in by_itself], image_only)
    return said if image_only else said + _beyond(appearance, known, by_itself, image_only)


def _beyond(appearance: Appearance, known: KnownAppearance, places: Sequence[int], image_only: bool) -> list[str]:
    """Sentences about those numbers at ``places`` that are outside, tested together."""
    if not places or len(known.patients) < 3:
        return []
    names = [known.names[place] for place in places]
    there = np.array(known.patients)[:, places]
    rows = np.concatenate([there, [[appearance.numbers[name] for name in names]]])
    n, distances = len(there), _distances(rows, names)
    limit = max(stats.t.ppf(1 - ALPHA / (2 * len(names)), n - 1), distances[:-1].max())
    said = []
    for place in np.argsort(-distances[-1], kind="stable"):
        if image_only and names[place].startswith(OF_LABELS):
            continue
        low, high, value = there[:, place].min(), there[:, place].max(), rows[-1, place]
        if distances[-1, place] > limit and not (names[place] == AGREEMENT and value > low):
            shown = [_in_units(names[place], one) for one in (value, low, high)]
            what = "agreement of the candidate masks" if names[place] == AGREEMENT else names[place]
            said.append(
                f"{what} is {shown[0]}; in the {pluralize(n, 'labelled ' + UNIT[0])} it is {shown[1]} to {shown[2]}"
            )
    return said


def bound_by_appearance(
    decision: Decision, look: Appearance, known: KnownAppearance, source_sha256: str
) -> tuple[Decision, str]:
    """Flag the decision about an image unlike those of the calibration patients, and go back to M0; live and in replay.

    If only a mask is unusual (the size or the brightness of a label of M0, or the agreement of the candidates), M0
    has probably failed. Going back to it would not help, so the chosen mask stays and the case is flagged.

    Args:
        decision: Verdict of the policy.
        look: The image, with the agreement of its candidates where that is known.
        known: Appearances of the calibration patients.
        source_sha256: Hash of M0.

    Returns:
        The decision that holds, and why; "" where the image is like the others.
    """
    said = outside(look, known)
    of_image = outside(look, known, image_only=True) if said else []
    if not said:
        return decision, ""
    if not of_image:
        unlike = f"the masks of this case are unlike those of the labelled ones: {said[0]}"
        return replace(decision, flagged=True), unlike
    reason = f"this image is unlike the labelled ones: {of_image[0]}"
    back = Decision(
        decision.case_id, Action.ROLLBACK, SOURCE, executed=decision.executed, controller=decision.controller,
        group=decision.group, cluster=decision.cluster, reason=reason, state_hash=source_sha256, flagged=True,
    )  # fmt: skip
    return back, reason


def _distances(rows: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    """t of every number of every row against all other rows."""
    others = len(rows) - 1
    means = (rows.sum(axis=0) - rows) / others
    squares = ((rows - rows.mean(axis=0)) ** 2).sum(axis=0) - (rows - rows.mean(axis=0)) ** 2
    variances = np.maximum(squares - others * (means - rows.mean(axis=0)) ** 2, 0) / (others - 1)
    spread = np.sqrt(np.maximum(variances, np.array([_floor(name) for name in names]) ** 2))
    return np.asarray(np.abs(rows - means) / (spread * math.sqrt(1 + 1 / others)))


def folder_differs(cases: Sequence[Appearance], known: KnownAppearance) -> tuple[float, str]:
    r"""Test whether the patients of a folder look unlike the calibration patients.

    With one row :math:`x_i` per patient, standardized over both groups, the energy distance

    .. math:: 2\,\overline{|x_i - y_j|} - \overline{|x_i - x_j|} - \overline{|y_i - y_j|}

    is compared with its values after patients were exchanged between the groups: all exchanges where there are few,
    4,999 random ones otherwise. If both groups are alike, p is at most u with probability at most u.

    Args:
        cases: Appearances of the folder; the first case of each patient counts.
        known: Appearances of the calibration patients.

    Returns:
        p and a sentence. p is never below one over the number of exchanges; a folder of one patient against nine has
        p >= 0.1, so few patients cannot show a difference.

    Raises:
        BadInput: If the folder has no case, or shares no number with the calibration cases.
    """
    if not cases:
        raise BadInput("a folder without cases cannot be compared with the calibration cases")
    firsts = _first_cases(cases)
    places = [place for place, name in enumerate(known.names) if all(name in one.numbers for one in firsts)]
    if not places:
        raise BadInput(f"these cases have none of the numbers of calibration: {', '.join(known.names[:3])}")
    names = [known.names[place] for place in places]
    there = np.array(known.patients)[:, places]
    here = np.array([[one.numbers[name] for name in names] for one in firsts])
    both = np.concatenate([there, here])
    scale = np.maximum(both.std(axis=0), [_floor(name) for name in names])
    rows = (both - both.mean(axis=0)) / scale
    gaps = np.sqrt(((rows[:, None] - rows[None]) ** 2).sum(axis=2))
    p = _permutation_p(gaps, len(here))
    apart = np.abs(np.median(here, axis=0) - np.median(there, axis=0)) / scale
    most = int(np.argmax(apart))
    medians = [_in_units(names[most], float(np.median(group[:, most]))) for group in (here, there)]
    return p, (
        f"{pluralize(len(here), *UNIT)} here against {len(there)} labelled ones: permutation test over {UNIT[1]}, "
        f"p = {p:.3g}; the largest difference is {names[most]}, median {medians[0]} here and {medians[1]} in the "
        "labelled ones"
    )


def _in_units(name: str, value: float) -> str:
    """A number as a person reads it: shares and spacings are stored as logarithms."""
    if name.startswith(OF_LABELS[0]):
        return f"{max(10**value - SMALL_SHARE, 0):.2%} of the image"
    return f"{math.exp(value):.3g} mm" if name.startswith("spacing") else f"{value:.3g}"


def _permutation_p(gaps: NDArray[Any], new: int) -> float:
    """p of the energy distance between the last ``new`` rows and the others."""
    total = len(gaps)
    own = np.arange(total) >= total - new
    every = math.comb(total, new) <= MOST_PERMUTATIONS + 1
    if every:
        chosen = np.zeros((math.comb(total, new), total))
        for row, members in zip(chosen, itertools.combinations(range(total), new), strict=True):
            row[list(members)] = 1
    else:
        generator = np.random.default_rng(0)
        chosen = generator.permuted(np.tile(own.astype(float), (MOST_PERMUTATIONS, 1)), axis=1)
        chosen = np.concatenate([own[None].astype(float), chosen])  # the observed division counts as one of them
    observed = _energy(gaps, own[None].astype(float))[0]
    return float(np.mean(_energy(gaps, chosen) >= observed - 1e-9))


def _energy(gaps: NDArray[Any], chosen: NDArray[Any]) -> NDArray[Any]:
    """The energy distance between the rows that are chosen and the others, for each division (row of ``chosen``)."""
    new = chosen[0].sum()
    old = len(gaps) - new
    toward = chosen @ gaps
    inside, across = (toward * chosen).sum(axis=1), (toward * (1 - chosen)).sum(axis=1)
    rest = gaps.sum() - inside - 2 * across
    return np.asarray(2 * across / (new * old) - inside / new**2 - rest / old**2)


def _first_cases(cases: Sequence[Appearance]) -> list[Appearance]:
    """The first case of each patient, by its name."""
    found: dict[str, Appearance] = {}
    for case in sorted(cases, key=lambda one: one.case_id):
        found.setdefault(case.patient, case)
    return list(found.values())


def _floor(name: str) -> float:
    return _FLOORS.get(name.split()[0], 1e-9)
