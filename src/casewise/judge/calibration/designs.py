"""Which way of choosing among candidates helps here: every design is fitted and scored by cross-fitting over clusters.

All that labels say of a case is gathered once (:func:`gather`): the metric of every candidate, and for every piece of
the consensus edit how many voxels it made right and wrong. A design is then a function from some cases to a controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, Action, Controller, Mask, Observation, State, Verdict
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.calibration.quality import QualityFit, carries, fit_quality
from casewise.judge.controllers.choose import (
    FEATURES,
    AgreementRule,
    Choose,
    added,
    board,
    features,
    state_of,
    with_agreement,
)
from casewise.judge.controllers.depth import Source
from casewise.judge.controllers.flag import deployed_signal
from casewise.judge.controllers.merge import PIECE, PIECE_FEATURES, Merge, Pieces, merged, piece_features, piece_scores
from casewise.judge.deciding import candidate_masks, decision_of
from casewise.judge.outcomes import outcomes, scoring_options
from casewise.measure.metrics import METRICS

Floats = NDArray[np.float64]
CONSENSUS_NAMES = ("consensus", "mean", "weighted", "vote", "majority")
"""What a rung is called that was made of the others."""

FOLDS = 10  # at most; with fewer clusters each is left out in turn
ALLOWED_HURT = 0.1  # share of cases that a design, or the anchor of choose, may hurt by more than a point
POINT = 0.01  # a case that lost more than this was hurt by more than a point


@dataclass(frozen=True)
class Setting:
    """What all designs share: the candidates, the consensus among them, and who has a vote."""

    steps: int
    consensus: str
    ladders: tuple[str, ...] = ()  # read together; none for the ladder in view
    silent: tuple[str, ...] = ()
    background: bool = False


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


@dataclass(frozen=True)
class DesignRow:
    """One line of the table: a design, cross-fitted."""

    design: str
    cases: int
    clusters: int
    gain: float
    low: float  # one-sided, over clusters
    high: float
    helped: int
    hurt: int
    hurt_by_a_point: int
    worst: float
    unchanged: int
    captured: float | None  # share of what the best candidate of each case would gain

    def sentence(self) -> str:
        """For a person."""
        share = "" if self.captured is None else f", {self.captured:.0%} of the oracle"
        return (
            f"{self.design:22s} {self.gain:+.4f} [{self.low:+.4f}, {self.high:+.4f}]  {self.helped} : {self.hurt}, "
            f"{self.hurt_by_a_point} by more than a point, worst {self.worst:+.3f}{share}"
        )


@dataclass(frozen=True)
class Comparison:
    """All designs on the same cases, and the one that is taken."""

    rows: tuple[DesignRow, ...]
    chosen: str
    why: str
    allowed_hurt: float
    deployed: Mapping[str, tuple[Deployed, ...]] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the single cases."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "chosen": self.chosen,
            "why": self.why,
            "allowed_hurt": self.allowed_hurt,
        }


def has_consensus(archive: Archive, consensus: str | None) -> bool:
    """Whether an archive holds a candidate that was made of the others, or one is named."""
    views = [archive.on(name) for name in archive.joined] or [archive]
    rungs = [rung for view in views for rung in next(iter(view.entries.values())).rungs]
    return consensus is not None or any(rung.split("(")[0] in CONSENSUS_NAMES for rung in rungs)


def setting_of(
    archive: Archive, *, consensus: str | None = None, silent: Sequence[str] = (), ladders: Sequence[str] = ()
) -> Setting:
    """The candidates of an archive; the consensus is found by the name of its rung unless it is given."""
    views = _views(archive, ladders)
    rungs: dict[State, str] = {}
    for name, view in views.items():
        entry = next(iter(view.entries.values()), None)
        if entry is not None:
            rungs |= {State(step).on(name): rung for step, rung in enumerate(entry.rungs, start=1)}
    made = {state: rung for state, rung in rungs.items() if rung.split("(")[0] in CONSENSUS_NAMES}
    if consensus is None and made:
        consensus = str(min(made, key=lambda state: CONSENSUS_NAMES.index(made[state].split("(")[0])))
    if consensus is None:
        raise BadInput(
            f"no candidate of {archive.path} is called {' or '.join(CONSENSUS_NAMES)}; record views or members with a "
            f"consensus, or say which candidate it is"
        )
    others = [str(state) for state in made if str(state) != consensus]
    first = next(iter(views.values()))
    return Setting(
        first.steps,
        consensus,
        tuple(ladders),
        tuple(dict.fromkeys((*silent, *others))),
        str(first.configuration.get("metric", "dice")) == "miou",
    )


def _views(archive: Archive, ladders: Sequence[str]) -> dict[str, Archive]:
    """The ladders that are read, by name; the one in view has no name in states."""
    return {name: archive.on(name) for name in ladders} if ladders else {"": archive.one()}


def gather(archive: Archive, setting: Setting) -> list[Known]:
    """Everything that labels say of the candidates of each labelled case."""
    views = _views(archive, setting.ladders)
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
            _observation(archive, case_id, setting),
            masks,
            silent=(*setting.silent, setting.consensus),
            background=setting.background,
        )
        truth, silent = archive.label(case_id), (*setting.silent, setting.consensus)
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


def _observation(archive: Archive, case_id: str, setting: Setting) -> Observation:
    if setting.ladders:
        return archive.whole_observation(case_id, setting.ladders)
    return archive.observation(case_id, archive.steps)


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


def fit_choose(known: Sequence[Known], setting: Setting, *, ridge: float = 1.0, level: float = 0.9) -> Controller:
    """An anchor, and where another candidate is surely better than it.

    The anchor is the fixed candidate with the largest lower bound of gain over clusters among those that hurt at most
    one case in ten by more than a point, as ``default`` takes a design; M0 where none is above 0. It is left only if
    leaving it was tried: with models fitted without a cluster, the departures must gain over the anchor on the
    clusters left out (lower bound above 0). Where signals carry nothing, the anchor is all there is.
    """
    clusters = [one.cluster for one in known]
    lows = {SOURCE: 0.0}
    for state in board(known[0].seen):
        gains = np.array([one.metric[state] - one.source for one in known])
        if state != SOURCE and (gains < -POINT).sum() <= ALLOWED_HURT * len(gains):
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
    which = np.array([place[name] for row in rows for name in row[2]])
    scale = np.sqrt((x**2).mean(axis=0))
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


def cross_fitted(known: Sequence[Known], setting: Setting, design: Design) -> tuple[Deployed, ...]:
    """Every case by a controller that was fitted without its cluster."""
    found: dict[str, Deployed] = {}
    for inside, out in folds([one.cluster for one in known]):
        controller = design([known[i] for i in inside], setting)
        found |= {known[i].case_id: answer(known[i], controller) for i in out}
    return tuple(found[one.case_id] for one in known)


def compare_designs(
    known: Sequence[Known],
    setting: Setting,
    designs: Mapping[str, Design] = DESIGNS,
    *,
    allowed_hurt: float = ALLOWED_HURT,
    level: float = 0.9,
) -> Comparison:
    """Score every design by cross-fitting; take the one with the largest lower bound of gain at the allowed harm.

    ``allowed_hurt`` is the share of cases that may lose more than a point. M0 where no lower bound is above 0.
    """
    deployed = {name: cross_fitted(known, setting, design) for name, design in designs.items()}
    best = [max(one.metric.values()) - one.source for one in known]
    rows = tuple(_row(name, found, float(np.mean(best)), level) for name, found in deployed.items())
    fit = [row for row in rows if row.low > 0 and row.hurt_by_a_point <= allowed_hurt * row.cases + 1e-9]
    if not fit:
        why = (
            f"no design surely gains (lower bound over clusters, level {level:g}) with at most {allowed_hurt:.0%} hurt"
        )
        return Comparison(rows, "m0", why, allowed_hurt, deployed)
    chosen = max(fit, key=lambda row: row.low)
    hurt = f"{chosen.hurt_by_a_point} of {chosen.cases} hurt by more than a point"
    why = f"the largest lower bound of gain, {chosen.low:+.4f}, with {hurt}"
    return Comparison(rows, chosen.design, why, allowed_hurt, deployed)


def _row(name: str, found: Sequence[Deployed], oracle: float, level: float) -> DesignRow:
    gain = np.array([one.gain for one in found])
    mean, low, high = mean_low(gain, [one.cluster for one in found], level=level)
    return DesignRow(
        name,
        len(gain),
        len({one.cluster for one in found}),
        mean,
        low,
        high,
        int((gain > 0).sum()),
        int((gain < 0).sum()),
        int((gain < -POINT).sum()),
        float(gain.min()),
        int((gain == 0).sum()),
        mean / oracle if oracle > 0 else None,
    )


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


def quality_of(found: Sequence[Deployed], *, level: float) -> QualityFit:
    """The quality model of what a design deploys, from cases whose clusters had no part in fitting it."""
    agreement = [_or_nan(one.agreement) for one in found]
    return fit_quality(agreement, [one.metric for one in found], [one.cluster for one in found], level=level)


def fitted_choice(
    archive: Archive,
    design: str,
    *,
    consensus: str | None = None,
    ladders: Sequence[str] = (),
    allowed_hurt: float = ALLOWED_HURT,
    flag_below: float | None = None,
    at: float = 0.9,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(design, options of its controller, what was found on the way); ``default`` is the design that compares best.

    Every figure in what was found comes from cases whose cluster had no part in fitting.
    """
    setting = setting_of(archive, consensus=consensus, ladders=ladders)
    known = gather(archive, setting)
    asked = DESIGNS if design == "default" else {"m0": DESIGNS["m0"], design: DESIGNS[design]}
    compared = compare_designs(known, setting, asked, allowed_hurt=allowed_hurt)
    name = compared.chosen if design == "default" else design
    controller = DESIGNS[name](known, setting)
    options = {} if name == "m0" else asdict(controller)  # type: ignore[call-overload]
    options.pop("rule", None)
    found: dict[str, Any] = {
        "cases": len(archive.ids),
        "labelled": len(known),
        "clusters": len({one.cluster for one in known}),
        "comparison": compared.as_dict(),
        "signals": _signal_report(known),
        "retained": _retained(compared, name),
        "concerns": _concerns(compared, name),
    }
    if flag_below is not None:
        fit = quality_of(compared.deployed[name], level=at)
        options["flag"] = _flag(fit, flag_below, setting)
        found["quality"] = {**fit.as_dict(), **_flagged(compared.deployed[name], fit, flag_below)}
        found["concerns"] += _flag_concerns(fit)
    return name, options, found


def fitted_flag(
    archive: Archive, controller: Controller, *, below: float, at: float, consensus: str | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(flag, what it does here, concerns) for a controller that reads one ladder step by step.

    The lower bound comes from the worst mask of each case's ladder, M0 and shrunk ones included, so it holds whichever
    is deployed: cut-points may be fitted on the same cases, move later, or differ by group.
    """
    if has_consensus(archive, consensus):
        setting = setting_of(archive, consensus=consensus)
    else:
        setting = Setting(archive.steps, "", background=archive.configuration.get("metric") == "miou")
    frame = outcomes(archive)
    rows, found = [], []
    for case_id in archive.ids:
        own = frame.loc[(frame["case"] == case_id) & np.isfinite(frame["metric"])]
        if own.empty:
            continue
        seen = with_agreement(
            _observation(archive, case_id, setting),
            candidate_masks(archive, case_id),
            silent=_voiceless(setting),
            background=setting.background,
        )
        worth = {
            State(int(step), float(shrink)): float(metric)
            for step, shrink, metric in own[["step", "shrink", "metric"]].itertuples(index=False)
        }
        said = {state: deployed_signal(board(seen), state, "agreement") for state in worth}
        rows.append((said, worth))
        taken = decision_of(archive, controller, case_id).state.on("")
        cluster = archive.entry(case_id).cluster or case_id
        found.append(Deployed(case_id, cluster, str(taken), False, worth[SOURCE], worth[taken], said[taken]))
    if not found:
        raise TooFewCases(f"flags are calibrated on labelled cases, {archive.path} has none; record with labels")
    states = sorted(set().union(*(worth for _, worth in rows)), key=str)
    signal, truth = (
        np.array([[_or_nan(one[part].get(state)) for state in states] for one in rows], np.float64) for part in (0, 1)
    )
    own_signal = [_or_nan(one.agreement) for one in found]
    clusters = [one.cluster for one in found]
    fit = fit_quality(own_signal, [one.metric for one in found], clusters, level=at, every=(signal, truth))
    quality = {**fit.as_dict(), **_flagged(found, fit, below)}
    return _flag(fit, below, setting), quality, _flag_concerns(fit)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _voiceless(setting: Setting) -> tuple[str, ...]:
    return (*setting.silent, setting.consensus) if setting.consensus else setting.silent


def _flag(fit: QualityFit, below: float, setting: Setting) -> dict[str, Any]:
    """The flag of a policy, as plain options."""
    flag = {"quality": asdict(fit.quality), "below": below, **asdict(setting)}
    flag.pop("consensus")
    return {**flag, "silent": _voiceless(setting)}


def _flag_concerns(fit: QualityFit) -> list[str]:
    if fit.quality.signal is not None:
        return []
    return [f"agreement does not carry here (rho {fit.rho:.2f}, p {fit.p:.2f}): all cases get the same lower bound"]


def _signal_report(known: Sequence[Known]) -> dict[str, Any]:
    """Does M0's agreement say how good M0 is, on these cases?"""
    own = [board(one.seen)[SOURCE].get("agreement") for one in known]
    pairs = [(a, one.source, one.cluster) for a, one in zip(own, known, strict=True) if a is not None]
    rho, p = carries([a for a, _, _ in pairs], [m for _, m, _ in pairs], [c for _, _, c in pairs])
    return {"agreement": {"rho": rho if np.isfinite(rho) else None, "p": p, "cases": len(pairs)}}


def _flagged(found: Sequence[Deployed], fit: QualityFit, below: float) -> dict[str, Any]:
    """How many calibration cases would be flagged, and how many of the poor ones are among them."""
    pairs = [(fit.quality.of(one.agreement), one.metric) for one in found]
    flags = np.array([quality is None or quality[1] < below for quality, _ in pairs])
    poor = np.array([metric < below for _, metric in pairs])
    return {"flagged": int(flags.sum()), "poor": int(poor.sum()), "poor_flagged": int((flags & poor).sum())}


def _retained(compared: Comparison, name: str) -> dict[str, Any]:
    """Whether the cases that a design changes are helped more often than hurt: what ``check_go`` acts on."""
    row = next(row for row in compared.rows if row.design == name)
    go = row.helped > row.hurt if row.helped + row.hurt else None
    return {"helped": row.helped, "hurt": row.hurt, "unchanged": row.unchanged, "go": go}


def _concerns(compared: Comparison, name: str) -> list[str]:
    row = next(row for row in compared.rows if row.design == name)
    if name == "m0":
        return [f"M0 is deployed for every case: {compared.why}"]
    bound = f"lower bound {row.low:+.4f} over {row.clusters} clusters"
    if _retained(compared, name)["go"] is False:
        return [f"NO-GO: {row.helped} calibration cases are helped by {name} and {row.hurt} are hurt ({bound} of gain)"]
    if row.low <= 0:
        return [f"{name} does not surely gain here ({bound})"]
    return []


def choice_sentences(found: Mapping[str, Any]) -> list[str]:
    """The table of designs and what was taken, for a terminal."""
    compared = found["comparison"]
    lines = ["design, cross-fitted over clusters: gain [lower, upper bound], helped : hurt"]
    lines += [f"  {DesignRow(**row).sentence()}" for row in compared["rows"]]
    if len(compared["rows"]) > 2:
        lines.append(f"taken: {compared['chosen']} ({compared['why']})")
    signal = found["signals"]["agreement"]
    if signal["rho"] is not None:
        lines.append(
            f"M0's agreement with the candidates has rank correlation {signal['rho']:.2f} with its metric "
            f"(p {signal['p']:.3f}, {signal['cases']} cases)"
        )
    return [*lines, *flag_sentences(found)]


def flag_sentences(found: Mapping[str, Any]) -> list[str]:
    """How many calibration cases are flagged, for a terminal; nothing without flags."""
    if "quality" not in found:
        return []
    quality = found["quality"]
    return [
        f"flags: {quality['flagged']} of {quality['cases']} calibration cases, {quality['poor_flagged']} of the "
        f"{quality['poor']} poor ones among them; lower bound at level {quality['quality']['level']:g} from "
        f"{quality['clusters']} clusters"
    ]
