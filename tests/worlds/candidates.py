"""A made-up cohort with real candidates: views that scatter around the truth, or all go wrong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from casewise.archive.layout import measure_words
from casewise.archive.store import Archive, create_archive
from casewise.core.records import Binding, Case, Mask, Trajectory
from casewise.core.seeds import seed_of
from casewise.measure.signals.agreement import candidates_of
from casewise.measure.signals.fragmentation import fragmentation

VIEWS = Binding("made-up", "views(made-up)", "made-up", measure_words(min_area=4, foreground=True))


def views_archive(
    path: str | Path,
    *,
    cases: int = 24,
    views: int = 5,
    per_cluster: int = 2,
    misled: bool = False,
    seed: int = 0,
    size: int = 32,
    ladder: str = "",
    labelled: bool = True,
    metric: str = "dice",
    void: int = 0,
    prefix: str = "case",
    split: str | None = "calibration",
    empty: bool = False,
    looks: bool = False,
    helpful: bool = False,
) -> Archive:
    """M0, ``views`` views and their majority ("vote") for each case; two rings are the classes.

    Cases differ in how far the views scatter. ``misled`` views share one mistake that M0 does not make, so that their
    agreement says nothing and their consensus hurts. ``helpful``: M0 is too small and no view hurts. ``empty``: M0 and
    all views find nothing. ``looks``: what the images look like was recorded, and all of them look alike.
    """
    configuration = {"metric": metric, "min_area": 4, "foreground": True, "objective": "views"}
    archive = create_archive(path, binding=VIEWS, steps=views + 1, configuration=configuration, ladder=ladder)
    for number in range(cases):
        case_id = f"{prefix}-{number:04d}"
        rng = np.random.default_rng(seed_of(seed, case_id))
        masks, label = made_up_case(rng, views=views, misled=misled, size=size, helpful=helpful)
        masks = [np.zeros_like(mask) for mask in masks] if empty else masks
        label[:void] = 255  # nobody knows
        signals = [fragmentation(masks[0], mask, min_area=4).as_signals() for mask in masks]
        rungs = (*(f"view-{k}" for k in range(1, views + 1)), "vote")
        trajectory = Trajectory(case_id, tuple(masks), tuple(signals), made_by="views", rungs=rungs)
        trajectory = replace(trajectory, appearance={"intensity mean of channel 0": 0.5} if looks else {})
        cluster = f"{prefix}-cluster-{number // per_cluster:04d}"
        case = Case(case_id, np.empty((1, 0)), cluster=cluster, split=split)
        archive.add(case, trajectory, label if labelled else None)
    return archive.seal()


def made_up_case(
    rng: np.random.Generator, *, views: int = 5, misled: bool = False, size: int = 32, helpful: bool = False
) -> tuple[list[Mask], Mask]:
    """M0, the views and their vote, and the label."""
    center, radius = np.full(2, size / 2), size * 0.3
    label = rings(size, center, radius)
    scatter = 0.05 if helpful else rng.uniform(0.02, 0.35)
    shared = rng.normal(size=2) * 4 if misled else np.zeros(2)
    masks = []
    for view in range(views + 1):
        off = rng.normal(size=2) * scatter * radius * 0.6 + (shared if view else 0)
        small = 0.6 if helpful and not view else 1.0
        masks.append(rings(size, center + off, small * radius * float(np.exp(rng.normal() * scatter * 0.6))))
    found = candidates_of(masks)
    masks.append(found.mask(found.majority, masks[0]))
    return masks, label


def rings(size: int, center: np.ndarray, radius: float) -> Mask:
    """Class 1 around class 2."""
    rows, columns = np.mgrid[:size, :size]
    distance = np.hypot(rows - center[0], columns - center[1])
    return ((distance < radius).astype(np.uint8) + (distance < radius * 0.6)).astype(np.uint8)
