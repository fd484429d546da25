"""Designs: ways of choosing among candidates, each fitted on labelled cases.

The labels are read once (:func:`gather`): the metric of every candidate, and for every piece of an edit how many voxels
it made right and wrong. A design is then a function from some cases to a controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from casewise.archive.store import Archive
from casewise.core.errors import TooFewCases
from casewise.core.records import SOURCE, Action, Controller, Mask, Observation, State, Verdict
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.data.splits import cluster_of, fold_of
from casewise.judge.calibration.adoption import ALLOWED_HURT, LEVEL, Floats, chance_of_best, mean_low
from casewise.judge.controllers import choose, merge
from casewise.judge.controllers.choose import AgreementRule, Choose, candidate_signals, state_of
from casewise.judge.controllers.depth import Settled, Source
from casewise.judge.controllers.flag import QUALITY_SIGNALS, deployed_signal
from casewise.judge.controllers.merge import PIECE_FEATURES, Merge
from casewise.judge.decide import Setting, candidate_masks, first_verdict, ladder_views, whole_case
from casewise.judge.outcomes import POINT, outcomes, scoring_options
from casewise.measure.metrics import METRICS
from casewise.measure.signals.agreement import Candidates

RIVALS = 2  # single candidates whose edits ``merge`` compares with the consensus
RIDGE, PIECE_RIDGE = 1.0, 0.01  # ridge of the gain of a candidate, and of the chance of a piece
SURE = 0.975  # confidence at which the gain of a fitted threshold counts as real
RIVALS_READ = 3  # single candidates whose edits are read with the consensus; others are read when they are needed
FOLDS = 10  # largest number of folds; with fewer clusters, each cluster is one fold


@dataclass(frozen=True, eq=False)
class Edit:
    """The pieces of one candidate's edit: their features, and the voxels that each one makes right and wrong."""

    features: Floats  # (piece, feature)
    before: NDArray[np.int64]  # class of each piece in M0
    after: NDArray[np.int64]  # class of each piece in the edit
    size: Floats  # voxels of each piece whose label is known
    lost: Floats  # voxels of these that are right in M0
    won: Floats  # voxels of these that are right in the edit
    counts: Floats  # (3, class): voxels that M0 and the label share, voxels of M0, voxels of the label
    metric: str
    scored: Callable[[tuple[int, ...]], float] | None = None  # scores whole masks, where counts are not enough

    def metric_of(self, accepted: NDArray[np.bool_]) -> float:
        """Return the metric of M0 with the accepted pieces."""
        if self.scored is not None:
            return self.scored(tuple(np.flatnonzero(accepted).tolist()))
        shared, in_mask, in_label = self.counts.copy()
        before, after, size = self.before[accepted], self.after[accepted], self.size[accepted]
        np.subtract.at(shared, before, self.lost[accepted])
        np.add.at(shared, after, self.won[accepted])
        np.subtract.at(in_mask, before, size)
        np.add.at(in_mask, after, size)
        of_counts = METRICS[self.metric].of_counts
        assert of_counts is not None
        return of_counts(shared, in_mask, in_label)

    @cached_property
    def pieces(self) -> tuple[Floats, Floats, Floats]:
        """Features of the pieces, equal rows merged, and the voxels that they make right and wrong."""
        alike, which = np.unique(self.features, axis=0, return_inverse=True)
        won, lost = (np.bincount(which.ravel(), part, minlength=len(alike)) for part in (self.won, self.lost))
        return alike, won.astype(np.float64), lost.astype(np.float64)


@dataclass(frozen=True, eq=False)
class Known:
    """One labelled case: the input of a controller, and the metric of each of its candidates."""

    case_id: str
    cluster: str
    seen: Observation  # with the agreement signals
    metric: Mapping[State, float]
    ha: Mapping[State, float]
    edits: KnownEdits  # of each candidate

    @property
    def source(self) -> float:
        """Metric of M0."""
        return self.metric[SOURCE]

    @cached_property
    def rows(self) -> tuple[Floats, Floats, list[str]]:
        """Features, gain over M0 and name of each candidate that has features, for ``choose``."""
        candidates = candidate_signals(self.seen)
        found = [
            (x, self.metric[state] - self.source, str(state))
            for state, signals in candidates.items()
            if state != SOURCE and (x := choose.features(signals, candidates[SOURCE])) is not None
        ]
        features = np.array([row[0] for row in found], np.float64).reshape(-1, len(choose.FEATURES))
        return features, np.array([row[1] for row in found]), [row[2] for row in found]


@dataclass(frozen=True)
class Deployed:
    """Out-of-fold result of one case: the deployed state and its metric."""

    case_id: str
    cluster: str
    state: str
    gated: bool
    source: float
    metric: float
    signals: Mapping[str, float | None]  # agreement of what was deployed, by name
    accepted: tuple[int, ...] = ()  # pieces of the edit, where it is gated
    cleanup: str = ""

    @property
    def gain(self) -> float:
        """Change of the metric against M0."""
        return self.metric - self.source


Progress = Callable[[str, int, int], None]
"""Called with the name of the step, the number of finished parts and the number of all parts."""


def gather(archive: Archive, setting: Setting, progress: Progress | None = None) -> list[Known]:
    """Gather the metric of every candidate of each labelled case, and the features and gains of edits."""
    total = sum(entry.labelled for entry in archive.entries.values())
    views = ladder_views(archive, setting.ladders)
    options = scoring_options(next(iter(views.values())))
    tables = {name: outcomes(view) for name, view in views.items()}
    first = (state_of(setting.consensus), *_best_states(tables, setting)[:RIVALS_READ])
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
        whole = whole_case(archive, case_id, setting)
        silent = choose.non_voting(whole, (*setting.silent, setting.consensus))
        held = choose.compared_masks(whole, masks, silent=silent, background=setting.background)
        seen = choose.added(whole, dict(zip(candidate_signals(whole), held.signals(), strict=True)))
        edits = KnownEdits(
            archive, case_id, setting.ladders, silent, options["metric"], options["ignore"], entry.spacing_mm
        )
        masks = {state: masks[state] for state in candidate_signals(whole)}  # in the order of ``held``
        edits.need([state for state in first if state in masks], masks, held)
        metrics = {state: metric for state, (metric, _) in worth.items()}
        harms = {state: ha for state, (_, ha) in worth.items()}
        found.append(Known(case_id, cluster_of(entry), seen, metrics, harms, edits))
        if progress is not None:
            progress("read", len(found), total)
    if not found:
        raise TooFewCases(f"designs are compared on labelled cases, and {archive.path} has none; record with labels")
    return found


def _best_states(tables: Mapping[str, pd.DataFrame], setting: Setting) -> list[State]:
    """Single candidates by their mean metric over all cases, the best first: ``merge`` looks at their edits."""
    means: dict[State, float] = {}
    for name, table in tables.items():
        plain = table.loc[(table["shrink"] == 0) & (table["step"] > 0)]
        means |= {State(int(step)).on(name): value for step, value in plain.groupby("step")["metric"].mean().items()}
    means.pop(state_of(setting.consensus), None)
    return sorted(means, key=lambda state: -means[state])


@dataclass(frozen=True, eq=False)
class KnownEdits:
    """The edits of the candidates of a case; each is computed when it is first needed."""

    archive: Archive
    case_id: str
    ladders: tuple[str, ...]
    silent: tuple[str, ...]
    metric: str
    ignore: int | None
    spacing_mm: tuple[float, ...] | None
    known: dict[State, Edit] = field(default_factory=dict)
    models: dict[tuple[tuple[str, ...], State], tuple[Floats, Floats, Floats]] = field(default_factory=dict)

    def __getitem__(self, state: State) -> Edit:
        self.need((state,))
        return self.known[state]

    def need(
        self, states: Iterable[State], masks: Mapping[State, Mask] | None = None, held: Candidates | None = None
    ) -> None:
        """Compute some edits together; ``held`` is the comparison of the masks, if it is known."""
        missing = [state for state in states if state not in self.known]
        if missing:
            masks = masks or candidate_masks(self.archive, self.case_id, self.ladders)
            label, held = self.archive.label(self.case_id), held or merge.opinions(masks, self.silent)
            counts = self._counts(masks, label)
            self.known.update({state: self._edit(masks, state, held, label, counts) for state in missing})

    def _counts(self, masks: Mapping[State, Mask], label: Mask) -> Floats:
        """Voxels of each class: shared by M0 and the label, in M0, in the label; ignored voxels are left out."""
        old, truth = masks[SOURCE].reshape(-1), label.reshape(-1)
        if self.ignore is not None:
            known = truth != self.ignore
            old, truth = old[known], truth[known]
        classes = int(max(truth.max(initial=0), *(mask.max(initial=0) for mask in masks.values()))) + 1
        return np.array([np.bincount(part, minlength=classes) for part in (old[old == truth], old, truth)], np.float64)

    def _edit(self, masks: Mapping[State, Mask], state: State, held: Candidates, label: Mask, counts: Floats) -> Edit:
        pieces, features = merge.piece_features(masks, state, self.silent, held)
        truth = label.reshape(-1)[pieces.voxels]
        valid = np.ones(truth.size, bool) if self.ignore is None else truth != self.ignore

        def tally(voxels: NDArray[np.bool_]) -> Floats:
            return np.bincount(pieces.number[voxels], minlength=len(pieces.sizes)).astype(np.float64)

        def scored(accepted: tuple[int, ...]) -> float:
            mask = merge.merged(masks[SOURCE], masks[state], accepted)
            return METRICS[self.metric].of(mask, label, ignore=self.ignore, spacing_mm=self.spacing_mm)

        return Edit(
            features, pieces.before, pieces.after, size=tally(valid),
            lost=tally(valid & (truth == pieces.before[pieces.number])),
            won=tally(valid & (truth == pieces.after[pieces.number])), counts=counts, metric=self.metric,
            scored=scored if METRICS[self.metric].of_counts is None else None,
        )  # fmt: skip


Design = Callable[[Sequence[Known], Setting], Controller]
"""From some labelled cases to a controller."""


def fit_rule(rule: str, **options: Any) -> Design:
    """Return the design of a rule that is not fitted."""
    return lambda known, setting: AgreementRule(**asdict(setting), rule=rule, **options)  # type: ignore[arg-type]


def fit_low_agreement(known: Sequence[Known], setting: Setting) -> Controller:
    """Fit the agreement of M0 below which the consensus is deployed; M0 everywhere if the gain may be chance."""
    said = [candidate_signals(one.seen)[SOURCE]["agreement"] for one in known]
    own = np.array([np.inf if value is None else value for value in said])  # all masks are empty: M0
    gain = np.array([one.metric[state_of(setting.consensus)] - one.source for one in known])
    cuts = [-np.inf, *np.unique(own[np.isfinite(own)])[1:].tolist(), np.inf]
    gains = np.where(own[:, None] < np.array(cuts), gain[:, None], 0.0)
    best = int(np.argmax(gains.sum(axis=0)))
    sure = chance_of_best(gains, [one.cluster for one in known])[best] <= 1 - SURE
    return AgreementRule(**asdict(setting), rule="low-agreement", threshold=cuts[best] if sure else -np.inf)


def fit_choose(known: Sequence[Known], setting: Setting, *, allowed_hurt: float = ALLOWED_HURT) -> Controller:
    """Fit ``choose``: the anchor, and a model of when another candidate is better.

    The anchor is the fixed candidate with the largest lower bound of gain over clusters, among those that hurt at most
    ``allowed_hurt`` of the cases by more than a point; M0 if no bound is above 0. Other candidates are allowed only if
    models fitted without a cluster gain over the anchor on that cluster (lower bound above 0). Otherwise the anchor is
    deployed for every case.
    """
    clusters = [one.cluster for one in known]
    lows = {SOURCE: 0.0}
    for state in candidate_signals(known[0].seen):
        gains = np.array([one.metric[state] - one.source for one in known])
        if state != SOURCE and (gains < -POINT).sum() <= allowed_hurt * len(gains) + 1e-9:
            lows[state] = mean_low(gains, clusters)[1]
    anchor = max(lows, key=lambda state: lows[state])
    found = _departures(known, setting, anchor)
    if len(set(clusters)) < 3:
        return replace(found, spread=float("inf"))
    more = np.zeros(len(known))
    for inside, out in folds(clusters):
        tried = _departures([known[i] for i in inside], setting, anchor)
        more[out] = [answer(known[i], tried).metric - known[i].metric[anchor] for i in out]
    return found if mean_low(more, clusters)[1] > 0 else replace(found, spread=float("inf"))


def _departures(known: Sequence[Known], setting: Setting, anchor: State) -> Choose:
    """Fit the expected gain of a candidate by ridge regression, on all cases and without each cluster in turn.

    The intercept of a candidate is shrunk by the noise of its mean residual (empirical Bayes).
    """
    rows = [one.rows for one in known]
    names = sorted({name for one in rows for name in one[2]})
    clusters = np.array([one.cluster for one in known])
    shrink = _shrinkage(rows, names)
    whole = _fit_gain(rows, names, shrink)
    left_out = [
        _fit_gain([row for row, cluster in zip(rows, clusters, strict=True) if cluster != out], names, shrink)
        for out in np.unique(clusters)
    ]
    return Choose(
        **asdict(setting), weights=whole[0], own=whole[1], replicates=tuple(left_out),
        spread=float(stdtrit(max(1, len(left_out) - 1), LEVEL)), anchor=str(anchor),
    )  # fmt: skip


def _shrinkage(rows: Sequence[tuple[Floats, Floats, list[str]]], names: Sequence[str]) -> float:
    """Variance of a residual over the variance between candidates: the ridge that treats their means as random."""
    if not names:  # masks are empty everywhere, so nothing agrees and there is nothing to learn from
        return 1e6
    weights, _ = _fit_gain(rows, names, 1e9)
    place = {name: k for k, name in enumerate(names)}
    rest = np.concatenate([row[1] - row[0] @ np.asarray(weights) for row in rows])
    which = np.array([place[name] for row in rows for name in row[2]])
    counts = np.bincount(which, minlength=len(names))
    means = np.bincount(which, rest, minlength=len(names)) / np.maximum(counts, 1)
    within = float(((rest - means[which]) ** 2).sum() / max(1, len(rest) - len(names)))
    between = float((means**2).mean() - within * (1 / np.maximum(counts, 1)).mean())
    return min(1e6, max(1e-6, within / between)) if between > 0 else 1e6  # 0 would leave nothing to solve


def _fit_gain(
    rows: Sequence[tuple[Floats, Floats, list[str]]], names: Sequence[str], shrink: float
) -> tuple[tuple[float, ...], tuple[tuple[str, float], ...]]:
    r"""Fit the gain y of a candidate k: weights w of its features x, and an intercept b_k that counts where it edits.

    .. math:: \min_{w, b} \sum (y - w \cdot x / s - b_k 1[\mathrm{edit} > 0])^2
              + \mathrm{ridge}\, |w|^2 + \mathrm{shrink}\, |b|^2, \qquad s = \sqrt{\overline{x^2}}
    """
    x, y = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
    place = {name: k for k, name in enumerate(names)}
    which = np.array([place[name] for row in rows for name in row[2]], np.intp)
    scale = np.sqrt((x**2).sum(axis=0) / max(1, len(x)))
    scale = np.where(scale > 0, scale, 1.0)
    own = np.zeros((len(y), len(names)))
    own[np.arange(len(y)), which] = x[:, 1] > 0
    design = np.column_stack([x / scale, own])
    penalty = np.diag([RIDGE] * x.shape[1] + [shrink] * len(names))
    solved = np.linalg.solve(design.T @ design + penalty, design.T @ y)
    own_part = tuple(zip(names, solved[x.shape[1] :].tolist(), strict=True))
    return tuple((solved[: x.shape[1]] / scale).tolist()), own_part


THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def fit_merge(known: Sequence[Known], setting: Setting) -> Controller:
    """Fit which pieces of one candidate's edit are right; candidate and threshold are chosen on left-out clusters.

    The consensus is compared with the two single candidates that gain most. The best of many settings looks
    better than it is, so M0 is deployed unless its gain passes a test that accounts for all of them.
    """
    consensus = state_of(setting.consensus)
    single = [state for state in candidate_signals(known[0].seen) if state not in (SOURCE, consensus)]
    single.sort(key=lambda state: -float(np.mean([one.metric[state] for one in known])))
    edits = (consensus, *single[:RIVALS])
    for one in known:
        one.edits.need(edits)
    gains = np.hstack([_held_out_gains(known, edit) for edit in edits])
    clusters = [one.cluster for one in known]
    best = int(np.argmax([mean_low(column, clusters, level=SURE)[1] for column in gains.T]))
    taken, threshold = edits[best // len(THRESHOLDS)], THRESHOLDS[best % len(THRESHOLDS)]
    if chance_of_best(gains, clusters)[best] > 1 - SURE:
        threshold = float("inf")
    weights, center, scale = (tuple(part.tolist()) for part in _piece_model(known, taken))
    return Merge(**asdict(setting), edit=str(taken), weights=weights, center=center, scale=scale, threshold=threshold)


def _held_out_gains(known: Sequence[Known], edit: State) -> Floats:
    """Return the gain of each case and threshold, with a model that was fitted without the case's cluster."""
    gains = np.zeros((len(known), len(THRESHOLDS)))
    edits = [one.edits[edit] for one in known]
    for inside, out in folds([one.cluster for one in known]):
        model = _piece_model([known[i] for i in inside], edit)
        for i in out:
            scores = merge.piece_scores(edits[i].features, *model)
            accepted = scores[:, None] > np.array(THRESHOLDS)
            _, first, back = np.unique(accepted.sum(axis=0), return_index=True, return_inverse=True)
            # Sets of accepted pieces of equal size are equal, so each size is scored once.
            each = np.array([edits[i].metric_of(accepted[:, column]) for column in first])
            gains[i] = each[back] - known[i].source
    return gains


def _piece_model(known: Sequence[Known], edit: State) -> tuple[Floats, Floats, Floats]:
    """Fit the pieces of some cases. The first case keeps the fit, because folds within folds ask for it again."""
    models, key = known[0].edits.models, (tuple(one.case_id for one in known), edit)
    if key not in models:
        models[key] = _fit_pieces([one.edits[edit].pieces for one in known])
    return models[key]


def _fit_pieces(pieces: Sequence[tuple[Floats, Floats, Floats]]) -> tuple[Floats, Floats, Floats]:
    r"""Fit the chance p that a piece made its voxels right: weights, and mean and deviation of the features.

    .. math:: \min_w \sum_j v_j \left(-t_j \ln p_j - (1 - t_j) \ln (1 - p_j)\right) + \mathrm{ridge}\, |w_{1:}|^2 / 2

    with :math:`v_j` the piece's share of all voxels that changed between right and wrong, and :math:`t_j` the share of
    them that became right; by Newton's method.
    """
    x, won, lost = (np.concatenate(part) for part in zip(*pieces, strict=True))
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
    penalty = np.diag([1e-9] + [PIECE_RIDGE] * width)
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


DESIGNS: Mapping[str, Design] = {
    "m0": lambda known, setting: Source(),
    "consensus": fit_rule("consensus"),
    "consensus-where-low": fit_low_agreement,
    "highest-agreement": fit_rule("agreement"),
    "medoid": fit_rule("medoid"),
    "merge": fit_merge,
    "choose": fit_choose,
}
"""From the simplest to the one with most parameters; among equals the first is taken."""

FITTED = ("consensus-where-low", "merge", "choose")  # their parameters are fitted to the labelled cases


def designs_for(
    known: Sequence[Known],
    setting: Setting,
    *,
    allowed_hurt: float = ALLOWED_HURT,
    fixed: Mapping[str, str] | None = None,
) -> dict[str, Design]:
    """Return all designs that can be fitted on these cases.

    Args:
        known: The labelled cases.
        setting: Settings that all designs share.
        allowed_hurt: Share of cases that may lose more than a point, where a design asks for it.
        fixed: States of candidates that are compared as separate designs, by name.

    Returns:
        Designs by name, M0 first. ``settled`` is among them where each rung is a consensus of all before it
        (``running:mri``).
    """
    found: dict[str, Design] = {**DESIGNS, "choose": partial(fit_choose, allowed_hurt=allowed_hurt)}
    if not setting.ladders and any("settled" in signals for signals in known[0].seen.signals[1:]):
        found["settled"] = lambda known, setting: Settled(cap=setting.steps)
    return {**found, **{name: fit_rule("fixed", candidate=state) for name, state in (fixed or {}).items()}}


class KnownLadder:
    """The gathered states of one case; the loop of ``judge/decide.py`` shows them to a controller."""

    def __init__(self, one: Known, *, at_once: bool) -> None:
        self.one = one
        self.executed = one.seen.step if at_once or one.seen.ladders else 0

    @property
    def complete(self) -> bool:
        """True when every state was shown."""
        return bool(self.one.seen.ladders) or self.executed >= self.one.seen.step

    def advance(self) -> None:
        """Show the next state."""
        self.executed += 1

    def observation(self) -> Observation:
        """Signals of the states shown so far, agreement included."""
        seen = self.one.seen
        return seen if self.complete else replace(seen, signals=seen.signals[: self.executed + 1])

    def compared(self, controller: Controller) -> Observation:
        """Signals of all states; for merge also the scores of the pieces, from the gathered features."""
        if not isinstance(controller, Merge):
            return self.one.seen
        return controller.scored(self.one.seen, self.one.edits[controller.edited].features)


def answer(one: Known, controller: Controller) -> Deployed:
    """Return the state that a controller deploys for a gathered case, and its metric."""
    own: Callable[[Known], Deployed] | None = getattr(controller, "answer", None)  # a design with cleanup has one
    if own is not None:
        return own(one)
    ladder = KnownLadder(one, at_once=hasattr(controller, "compared"))
    return _worth(one, first_verdict(controller, ladder)[0])


def _worth(one: Known, verdict: Verdict) -> Deployed:
    gated, pieces = verdict.action is Action.GATE, tuple(verdict.accepted or ())
    candidates = candidate_signals(one.seen)
    metric = one.metric[verdict.state]
    if gated:
        edit = one.edits[verdict.state]
        accepted = np.zeros(len(edit.features), bool)
        accepted[list(pieces)] = True
        metric = edit.metric_of(accepted)
    signals = {name: deployed_signal(candidates, verdict.state, name, gated=gated) for name in QUALITY_SIGNALS}
    return Deployed(one.case_id, one.cluster, str(verdict.state), gated, one.source, metric, signals, pieces)


def folds(clusters: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return (cases to fit on, cases to score) of each fold; cases of one cluster stay together."""
    number = fold_numbers(clusters)
    return [
        (np.flatnonzero(number != k).tolist(), np.flatnonzero(number == k).tolist())
        for k in range(int(number.max()) + 1)
    ]


def fold_numbers(clusters: Sequence[str]) -> NDArray[np.int64]:
    """Return the fold of each case: one fold for each cluster, at most :data:`FOLDS`."""
    amount = len(set(clusters))
    if amount < 2:
        raise TooFewCases(
            f"too few {UNIT[1]}: some fit a design and others score it, which needs 3, and 5 to show a gain; label more"
        )
    return fold_of(clusters, min(FOLDS, amount), seed=RESAMPLING_SEED)
