"""Designs: ways of choosing among candidates, each fitted on labelled cases.

All that labels say of a case is gathered once (:func:`gather`): the metric of every candidate, and for every piece of
the consensus edit how many voxels it made right and wrong. A design is then a function from some cases to a controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, Action, Controller, Mask, Observation, State, Verdict
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.controllers.choose import (
    FEATURES,
    AgreementRule,
    Choose,
    added,
    board,
    features,
    state_of,
    voiceless,
    with_agreement,
)
from casewise.judge.controllers.depth import Source
from casewise.judge.controllers.flag import deployed_signal
from casewise.judge.controllers.merge import PIECE, PIECE_FEATURES, Merge, Pieces, merged, piece_features, piece_scores
from casewise.judge.deciding import Setting, candidate_masks, ladder_views, whole_case
from casewise.judge.outcomes import POINT, outcomes, scoring_options
from casewise.measure.metrics import METRICS

Floats = NDArray[np.float64]
FOLDS = 10  # at most; with fewer clusters each is left out in turn
ALLOWED_HURT = 0.1  # share of cases that a design, or the anchor of choose, may hurt by more than a point


@dataclass(frozen=True, eq=False)
class Scored:
    """M0, the edit and the label of a case, for a metric that needs whole masks."""

    source: Mask
    edit: Mask
    label: Mask
    metric: str
    ignore: int | None
    spacing_mm: tuple[float, ...] | None

    def of(self, accepted: NDArray[np.bool_]) -> float:
        """The metric of M0 with the accepted pieces of the edit."""
        mask = merged(self.source, self.edit, tuple(np.flatnonzero(accepted).tolist()))
        return float(METRICS[self.metric].of(mask, self.label, ignore=self.ignore, spacing_mm=self.spacing_mm))


@dataclass(frozen=True, eq=False)
class Counts:
    """Voxels of each class that M0 and the label share, that M0 has, that the label has; and what each piece moves."""

    shared: Floats  # (class,)
    in_mask: Floats
    in_label: Floats
    before: NDArray[np.int64]  # class of each piece in M0
    after: NDArray[np.int64]
    size: Floats  # voxels of each piece whose label is known
    lost: Floats  # of them, those that were right in M0
    won: Floats  # of them, those that are right in the edit
    metric: str = "dice"
    scored: Scored | None = None  # where the metric cannot be had from counts

    def of(self, accepted: NDArray[np.bool_]) -> float:
        """The metric of M0 with the accepted pieces."""
        if self.scored is not None:
            return self.scored.of(accepted)
        shared, in_mask = self.shared.copy(), self.in_mask.copy()
        before, after = self.before[accepted], self.after[accepted]
        np.subtract.at(shared, before, self.lost[accepted])
        np.add.at(shared, after, self.won[accepted])
        np.subtract.at(in_mask, before, self.size[accepted])
        np.add.at(in_mask, after, self.size[accepted])
        of_counts = METRICS[self.metric].of_counts
        assert of_counts is not None
        return of_counts(shared, in_mask, self.in_label)


@dataclass(frozen=True, eq=False)
class Known:
    """One labelled case: what a controller sees of it, and what each of its answers is worth."""

    case_id: str
    cluster: str
    seen: Observation  # with the signals of disagreement
    metric: Mapping[State, float]
    ha: Mapping[State, float]
    edits: Mapping[State, tuple[Floats, Counts]]  # of each candidate: features of its pieces, and what they are worth

    @property
    def source(self) -> float:
        """The metric of M0."""
        return self.metric[SOURCE]


@dataclass(frozen=True)
class Deployed:
    """What a controller that had not seen a case's cluster did with it."""

    case_id: str
    cluster: str
    state: str
    gated: bool
    source: float
    metric: float
    agreement: float | None  # of what was deployed

    @property
    def gain(self) -> float:
        """Against M0."""
        return self.metric - self.source


def gather(archive: Archive, setting: Setting) -> list[Known]:
    """Everything that labels say of the candidates of each labelled case."""
    views = ladder_views(archive, setting.ladders)
    options = scoring_options(next(iter(views.values())))
    options = {name: options[name] for name in ("metric", "ignore")}
    tables = {name: outcomes(view) for name, view in views.items()}
    found = []
    for case_id in archive.ids:
        entry = archive.entry(case_id)
        if not entry.labelled:
            continue
        masks = candidate_masks(archive, case_id, setting.ladders)
        worth: dict[State, tuple[float, float]] = {}
        for name, table in tables.items():
            rows = table.loc[(table["case"] == case_id) & (table["shrink"] == 0)]
            for step, metric, ha in rows[["step", "metric", "ha"]].itertuples(index=False):
                worth[State(int(step)).on(name)] = (float(metric), float(ha))
        if not np.isfinite(worth[SOURCE][0]):
            continue
        seen = with_agreement(
            whole_case(archive, case_id, setting),
            masks,
            silent=(*setting.silent, setting.consensus),
            background=setting.background,
        )
        truth, silent = archive.label(case_id), voiceless(seen, (*setting.silent, setting.consensus))
        options["spacing_mm"] = entry.spacing_mm
        found.append(
            Known(
                case_id,
                entry.cluster or case_id,
                seen,
                {state: metric for state, (metric, _) in worth.items()},
                {state: ha for state, (_, ha) in worth.items()},
                {state: _edit(masks, state, silent, truth, **options) for state in masks if state != SOURCE},
            )
        )
    if not found:
        raise TooFewCases(f"designs are compared on labelled cases, {archive.path} has none; record with labels")
    return found


def _edit(
    masks: Mapping[State, Mask], state: State, silent: tuple[str, ...], label: Mask, **options: Any
) -> tuple[Floats, Counts]:
    pieces, rows = piece_features(masks, state, silent)
    counts = _counts(masks[SOURCE], label, pieces, metric=options["metric"], ignore=options["ignore"])
    if METRICS[counts.metric].of_counts is None:
        counts = replace(counts, scored=Scored(masks[SOURCE], masks[state], label, **options))
    return rows, counts


def _counts(source: Mask, label: Mask, pieces: Pieces, *, metric: str, ignore: int | None) -> Counts:
    old, truth = source.reshape(-1), label.reshape(-1)
    known = np.ones(truth.size, bool) if ignore is None else truth != ignore
    top = int(max(old.max(initial=0), truth[known].max(initial=0), pieces.after.max(initial=0))) + 1
    at, amount = pieces.voxels, len(pieces.sizes)
    valid = known[at]

    def tally(voxels: NDArray[np.bool_]) -> Floats:
        return np.bincount(pieces.number[voxels], minlength=amount).astype(np.float64)

    return Counts(
        shared=np.bincount(old[known & (old == truth)], minlength=top).astype(np.float64),
        in_mask=np.bincount(old[known], minlength=top).astype(np.float64),
        in_label=np.bincount(truth[known], minlength=top).astype(np.float64),
        before=pieces.before,
        after=pieces.after,
        size=tally(valid),
        lost=tally(valid & (truth[at] == pieces.before[pieces.number])),
        won=tally(valid & (truth[at] == pieces.after[pieces.number])),
        metric=metric,
    )


Design = Callable[[Sequence[Known], Setting], Controller]
"""From some labelled cases to a controller."""


def _plain(setting: Setting) -> dict[str, Any]:
    return asdict(setting)


def fit_rule(rule: str) -> Design:
    """A rule without parameters."""
    return lambda known, setting: AgreementRule(**_plain(setting), rule=rule)  # type: ignore[arg-type]


def fit_low_agreement(known: Sequence[Known], setting: Setting, *, level: float = 0.975) -> Controller:
    """The consensus below the agreement of M0 that gains most on these cases; nowhere if nothing surely gains."""
    said = [board(one.seen)[SOURCE]["agreement"] for one in known]
    own = np.array([np.inf if value is None else value for value in said])  # nobody holds anything: M0
    gain = np.array([one.metric[state_of(setting.consensus)] - one.source for one in known])
    cuts = [-np.inf, *np.unique(own[np.isfinite(own)])[1:].tolist(), np.inf]
    gains = np.where(own[:, None] < np.array(cuts), gain[:, None], 0.0)
    best = int(np.argmax(gains.sum(axis=0)))
    sure = chance_of_best(gains, [one.cluster for one in known])[best] <= 1 - level
    return AgreementRule(**_plain(setting), rule="low-agreement", threshold=cuts[best] if sure else -np.inf)


def fit_choose(
    known: Sequence[Known],
    setting: Setting,
    *,
    ridge: float = 1.0,
    level: float = 0.9,
    allowed_hurt: float = ALLOWED_HURT,
) -> Controller:
    """An anchor, and where another candidate is surely better than it.

    The anchor is the fixed candidate with the largest lower bound of gain over clusters among those that hurt at most
    ``allowed_hurt`` by more than a point, as ``default`` takes a design; M0 where none is above 0. It is left only if
    leaving it was tried: with models fitted without a cluster, the departures must gain over the anchor on the
    clusters left out (lower bound above 0). Where signals carry nothing, the anchor is all there is.
    """
    clusters = [one.cluster for one in known]
    lows = {SOURCE: 0.0}
    for state in board(known[0].seen):
        gains = np.array([one.metric[state] - one.source for one in known])
        if state != SOURCE and (gains < -POINT).sum() <= allowed_hurt * len(gains) + 1e-9:
            lows[state] = mean_low(gains, clusters, level=level)[1]
    anchor = max(lows, key=lambda state: lows[state])
    found = _departures(known, setting, anchor, ridge, level)
    if len(set(clusters)) < 3:
        return replace(found, spread=float("inf"))
    more = np.zeros(len(known))
    for inside, out in folds(clusters):
        tried = _departures([known[i] for i in inside], setting, anchor, ridge, level)
        more[out] = [answer(known[i], tried).metric - known[i].metric[anchor] for i in out]
    return found if mean_low(more, clusters, level=level)[1] > 0 else replace(found, spread=float("inf"))


def _departures(known: Sequence[Known], setting: Setting, anchor: State, ridge: float, level: float) -> Choose:
    """Expected gain of a candidate by ridge regression, and the same without each cluster in turn.

    What is particular to a candidate is shrunk by as much as its mean residual is noise (empirical Bayes).
    """
    rows = [_rows(one) for one in known]
    names = sorted({name for one in rows for name in one[2]})
    clusters = np.array([one.cluster for one in known])
    shrink = _shrinkage(rows, names, ridge)
    whole = _fit_gain(rows, names, ridge, shrink)
    left_out = [
        _fit_gain([row for row, cluster in zip(rows, clusters, strict=True) if cluster != out], names, ridge, shrink)
        for out in np.unique(clusters)
    ]
    return Choose(
        **_plain(setting),
        weights=whole[0],
        own=whole[1],
        replicates=tuple(left_out),
        spread=float(stdtrit(max(1, len(left_out) - 1), level)),
        anchor=str(anchor),
    )


def _rows(one: Known) -> tuple[Floats, Floats, list[str]]:
    candidates = board(one.seen)
    found = [
        (x, one.metric[state] - one.source, str(state))
        for state, signals in candidates.items()
        if state != SOURCE and (x := features(signals, candidates[SOURCE])) is not None
    ]
    rows = np.array([row[0] for row in found], np.float64).reshape(-1, len(FEATURES))
    return rows, np.array([row[1] for row in found]), [row[2] for row in found]


def _shrinkage(rows: Sequence[tuple[Floats, Floats, list[str]]], names: Sequence[str], ridge: float) -> float:
    """Variance of a residual over the variance between candidates: the ridge that treats their means as random."""
    if not names:  # masks are empty everywhere, so nothing agrees and there is nothing to learn from
        return 1e6
    weights, _ = _fit_gain(rows, names, ridge, 1e9)
    place = {name: k for k, name in enumerate(names)}
    rest = np.concatenate([row[1] - row[0] @ np.asarray(weights) for row in rows])
    which = np.array([place[name] for row in rows for name in row[2]])
    counts = np.bincount(which, minlength=len(names))
    means = np.bincount(which, rest, minlength=len(names)) / np.maximum(counts, 1)
    within = float(((rest - means[which]) ** 2).sum() / max(1, len(rest) - len(names)))
    between = float((means**2).mean() - within * (1 / np.maximum(counts, 1)).mean())
    return min(1e6, within / between) if between > 0 else 1e6


def _fit_gain(
    rows: Sequence[tuple[Floats, Floats, list[str]]], names: Sequence[str], ridge: float, shrink: float
) -> tuple[tuple[float, ...], tuple[tuple[str, float], ...]]:
    x, y = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
    place = {name: k for k, name in enumerate(names)}
    which = np.array([place[name] for row in rows for name in row[2]], np.intp)
    scale = np.sqrt((x**2).sum(axis=0) / max(1, len(x)))
    scale = np.where(scale > 0, scale, 1.0)
    own = np.zeros((len(y), len(names)))
    own[np.arange(len(y)), which] = x[:, 1] > 0
    design = np.column_stack([x / scale, own])
    penalty = np.diag([ridge] * x.shape[1] + [shrink] * len(names))
    solved = np.linalg.solve(design.T @ design + penalty, design.T @ y)
    own_part = tuple(zip(names, solved[x.shape[1] :].tolist(), strict=True))
    return tuple((solved[: x.shape[1]] / scale).tolist()), own_part


THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def fit_merge(
    known: Sequence[Known], setting: Setting, *, ridge: float = 0.01, rivals: int = 2, level: float = 0.975
) -> Controller:
    """Which pieces of the edit of one candidate are right; which candidate and which threshold by leaving clusters out.

    The consensus is judged beside the ``rivals`` single candidates that gain most. The best of so many settings looks
    better than it is, so everything is rejected (M0 is deployed) unless its gain passes a test that knows all of them.
    """
    consensus = state_of(setting.consensus)
    single = [state for state in board(known[0].seen) if state not in (SOURCE, consensus)]
    single.sort(key=lambda state: -float(np.mean([one.metric[state] for one in known])))
    edits = (consensus, *single[:rivals])
    gains = np.hstack([_held_out_gains(known, edit, ridge) for edit in edits])
    clusters = [one.cluster for one in known]
    best = int(np.argmax([mean_low(column, clusters, level=level)[1] for column in gains.T]))
    taken, threshold = edits[best // len(THRESHOLDS)], THRESHOLDS[best % len(THRESHOLDS)]
    if chance_of_best(gains, clusters)[best] > 1 - level:
        threshold = float("inf")
    return _merge(setting, taken, _fit_pieces([one.edits[taken] for one in known], ridge), threshold)


def chance_of_best(gains: Floats, clusters: Sequence[str], *, draws: int = 999, seed: int = RESAMPLING_SEED) -> Floats:
    """Chance that the best of all settings (columns) gains as surely as each does, were none of them to gain.

    The signs of whole clusters are flipped at random, in all columns alike; the largest t of any column is the
    yardstick (Westfall and Young's max-T), so a setting pays for having been picked among many.
    """
    _, number = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.stack([np.bincount(number, column) for column in gains.T], axis=1)
    size = np.sqrt((sums**2).sum(axis=0))
    t = np.divide(sums, size, out=np.zeros_like(sums), where=size > 0)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(sums)))
    largest = (signs @ t).max(axis=1)
    reached = largest[:, None] >= t.sum(axis=0) - 1e-9
    return np.asarray((1 + reached.sum(axis=0)) / (draws + 1))


def _held_out_gains(known: Sequence[Known], edit: State, ridge: float) -> Floats:
    """(case, threshold): the gain of a merge whose model had not seen the case's cluster."""
    gains = np.zeros((len(known), len(THRESHOLDS)))
    edits = [one.edits[edit] for one in known]
    for inside, out in folds([one.cluster for one in known]):
        model = _fit_pieces([edits[i] for i in inside], ridge)
        for i in out:
            rows, counts = edits[i]
            scores = piece_scores(rows, *model)
            gains[i] = [counts.of(scores > t) - known[i].source for t in THRESHOLDS]
    return gains


def _merge(setting: Setting, edit: State, model: tuple[Floats, Floats, Floats], threshold: float) -> Merge:
    weights, center, scale = (tuple(part.tolist()) for part in model)
    return Merge(**_plain(setting), edit=str(edit), weights=weights, center=center, scale=scale, threshold=threshold)


def _fit_pieces(edits: Sequence[tuple[Floats, Counts]], ridge: float) -> tuple[Floats, Floats, Floats]:
    """Logistic regression of "made right" against "made wrong", weighted by voxels, by Newton's method."""
    x = np.concatenate([rows for rows, _ in edits])
    won = np.concatenate([counts.won for _, counts in edits])
    lost = np.concatenate([counts.lost for _, counts in edits])
    total = won + lost
    width = len(PIECE_FEATURES)
    if not total.sum():
        return np.zeros(width + 1), np.zeros(width), np.ones(width)
    weight = total / total.sum()
    center = weight @ x
    scale = np.sqrt(weight @ (x - center) ** 2)
    scale = np.where(scale > 1e-9, scale, 1.0)
    design = np.column_stack([np.ones(len(x)), (x - center) / scale])
    target = np.divide(won, total, out=np.zeros_like(won), where=total > 0)
    penalty = np.diag([1e-9] + [ridge] * width)
    solved = np.zeros(width + 1)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(design @ solved, -35, 35)))
        slope = design.T @ (weight * (p - target)) + penalty @ solved
        curve = (design * (weight * p * (1 - p))[:, None]).T @ design + penalty
        step = np.linalg.solve(curve + 1e-12 * np.eye(len(curve)), slope)
        solved = solved - step
        if np.abs(step).max() < 1e-9:
            break
    return solved, center, scale


def fit_source(known: Sequence[Known], setting: Setting) -> Controller:
    """M0."""
    return Source()


DESIGNS: Mapping[str, Design] = {
    "m0": fit_source,
    "consensus": fit_rule("consensus"),
    "consensus-where-low": fit_low_agreement,
    "highest-agreement": fit_rule("agreement"),
    "medoid": fit_rule("medoid"),
    "merge": fit_merge,
    "choose": fit_choose,
}
"""From the simplest to the one with most parameters; among equals the first is taken."""


def designs_at(allowed_hurt: float) -> Mapping[str, Design]:
    """All designs, with the share of cases that may lose more than a point where one of them asks for it."""
    return {**DESIGNS, "choose": partial(fit_choose, allowed_hurt=allowed_hurt)}


def answer(one: Known, controller: Controller) -> Deployed:
    """What a controller deploys for a gathered case, and what that is worth."""
    seen = one.seen
    if isinstance(controller, Merge):
        scores = controller.scores(one.edits[controller.edited][0])
        named = {f"{PIECE}{number}": float(score) for number, score in enumerate(scores)}
        seen = added(seen, {controller.edited: {"pieces": float(len(scores)), **named}})
    verdict = controller.decide(seen)
    if verdict is None:
        raise BadInput(f"{controller.name} asked for more candidates than case {one.case_id} has")
    return _worth(one, verdict)


def _worth(one: Known, verdict: Verdict) -> Deployed:
    gated = verdict.action is Action.GATE
    metric = one.metric[verdict.state]
    if gated:
        rows, counts = one.edits[verdict.state]
        accepted = np.zeros(len(rows), bool)
        accepted[list(verdict.accepted or ())] = True
        metric = counts.of(accepted)
    return Deployed(
        one.case_id,
        one.cluster,
        str(verdict.state),
        gated,
        one.source,
        metric,
        deployed_signal(board(one.seen), verdict.state, "agreement", gated=gated),
    )


def folds(
    clusters: Sequence[str], *, amount: int = FOLDS, seed: int = RESAMPLING_SEED
) -> list[tuple[list[int], list[int]]]:
    """(cases to fit on, cases to score), clusters never torn apart; each cluster alone where there are few."""
    names = np.array(sorted(set(clusters)))
    if len(names) < 2:
        raise TooFewCases(f"cross-fitting needs at least two clusters (patients or sequences), got {len(names)}")
    mixed = np.random.default_rng(seed).permutation(names)
    out_of = {str(name): k % min(amount, len(names)) for k, name in enumerate(mixed)}
    number = np.array([out_of[name] for name in clusters])
    return [
        (np.flatnonzero(number != k).tolist(), np.flatnonzero(number == k).tolist())
        for k in range(int(number.max()) + 1)
    ]


def mean_low(values: Any, clusters: Sequence[str], *, level: float = 0.9) -> tuple[float, float, float]:
    """Mean over cases with one-sided bounds at ``level`` on either side, by Student's t over clusters."""
    numbers = np.asarray(values, np.float64)
    _, number = np.unique(np.asarray(clusters), return_inverse=True)
    amount = int(number.max()) + 1
    mean = float(numbers.mean())
    if amount < 2:
        return mean, -np.inf, np.inf
    rest = np.bincount(number, numbers - mean) / len(numbers)  # what each cluster adds to the mean's error
    error = float(np.sqrt(amount / (amount - 1) * (rest**2).sum())) * float(stdtrit(amount - 1, level))
    return mean, mean - error, mean + error
