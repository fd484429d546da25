"""The learning curve of one shift: gain on new patients against the number of labelled ones, as a picture.

    python benchmarks/real_curve.py hearts --data DATA -o OUT --picture docs/explanation/learning-curve.svg

After ``real_question.py hearts``, whose development recording it reads. Two, five and ten labelled patients, several
draws of each, then all of them: tuning for every case, views with the judge, and both with the judge
(``casewise.fit``). Fewer than four patients cannot be cross-fitted: ``fit`` learns nothing there, and "tuning" is one
network for all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from real_folders import print_small
from real_question import FEWEST, LEVEL, Question, _progress
from real_shifts import HOME, shifts

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.proposers.live import record_case
from casewise.core.durable import replacing
from casewise.core.errors import TooFewCases
from casewise.core.records import SOURCE, Mask
from casewise.deployment.saved import load
from casewise.fit import fit
from casewise.judge.calibration.adoption import mean_low
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.outcomes import POINT, scoring_options
from casewise.learn.tuning import Tuning, tune
from casewise.measure.metrics import METRICS
from casewise.replay import replay

SHIFT = "hearts-mirrored"
PATIENTS = (2, 5, 10)
METHODS = ("tuned, every case", "views, judged", "tuned and views, judged (fit)")
COLORS = ("#c45a11", "#2f6fb5", "#2e7d32")


class Draw:
    """Some labelled patients, what is learned from them, and what it does to the development cases."""

    def __init__(self, question: Question, patients: int, number: int) -> None:
        self.question, self.size, self.number = question, patients, number
        self.home = question.out / "question" / "curve" / question.shift.name / f"patients-{patients}-{number}"
        cases = question.cases("calibration")
        names = sorted({one.cluster or one.id for one in cases})
        order = np.random.default_rng((patients, number)).permutation(len(names))[:patients]
        chosen = {names[place] for place in order}
        self.cases = [one for one in cases if (one.cluster or one.id) in chosen]

    def learn(self) -> None:
        """Run ``fit`` without flags on these patients, or tune once where they are too few."""
        model, jobs = self.question.shift.model, self.question.jobs
        if self.size < FEWEST:
            folder = self.home / "tuned"
            if not (folder / "once.safetensors").exists():
                backbone = model.load()
                labels = [backbone.read_label(one.label) for one in self.cases if one.label is not None]
                tuned = tune(backbone, [backbone.read(one).case for one in self.cases], labels, Tuning())
                folder.mkdir(parents=True)
                tuned.write(folder / "once.safetensors")
        elif not (self.home / "fit.json").exists():
            fit(
                model, [one.images[0] for one in self.cases], [one.label for one in self.cases],
                patients=[one.cluster or one.id for one in self.cases], out=self.home, flag_below=0, jobs=jobs,
                learning_curve=False, on_progress=_progress(self.home.name),
            )  # fmt: skip

    def read(self, ids: Sequence[str]) -> None:
        """Predict new cases with the weights of this draw: the tuned mask, and the one that ``fit`` deploys."""
        backbone = self.question.shift.model.load()
        how = Adaptation("tuned:1", tuned=str(self.home / "tuned"))
        deployment = None if self.size < FEWEST else load(self.home, model=self.question.shift.model)
        (self.home / "masks").mkdir(exist_ok=True)
        for files in self.question.cases("development"):
            place = self.home / "masks" / f"{files.id}.npz"
            if files.id in ids and not place.exists():
                case = backbone.read(files).case
                made = [record_case(case, backbone, {"tuned": how})["tuned"].masks[1]]
                made += [] if deployment is None else [deployment.predict(case).mask]
                with replacing(place) as temporary, temporary.open("wb") as file:
                    np.savez_compressed(file, *made)

    def masks(self, method: str, views: str, ids: Sequence[str]) -> Mapping[str, Mask]:
        """Return what a method deploys for every new case."""
        if method == METHODS[0]:
            return {one: self.mask(one, 0) for one in ids}
        if method == METHODS[1] or self.size < FEWEST:  # fit has views alone where patients are too few
            return judged_views(self.question, views, [one.id for one in self.cases], ids)
        return {one: self.mask(one, 1) for one in ids}

    def mask(self, case_id: str, place: int) -> Mask:
        """Return the tuned mask (0) or the deployed one (1) of a new case."""
        with np.load(self.home / "masks" / f"{case_id}.npz") as file:
            found: Mask = file[f"arr_{place}"]
        return found


def judged_views(question: Question, views: str, labelled: Sequence[str], ids: Sequence[str]) -> Mapping[str, Mask]:
    """Return what views deploy after their designs were compared on some labelled cases; M0 where nothing passes."""
    try:
        policy = calibrate(question.fitted.ladder(views).select(ids=list(labelled)), "default")
    except TooFewCases:  # two patients: nothing can be judged, so M0 stays
        return {one: question.new.ladder(views).mask(one, SOURCE) for one in ids}
    decisions = {one.case_id: one for one in replay(question.new, policy)}
    return {one: question._deployed(policy, decisions, one) for one in ids}


def gains(question: Question, masks: Mapping[str, Mask]) -> list[float]:
    """Return the change of the metric against M0 by case."""
    view = question.new.ladder(question.new.ladders[0])
    options = scoring_options(view)

    def score(mask: Mask, one: str) -> float:
        metric = METRICS[options["metric"]]
        return float(metric.of(mask, question.new.label(one), ignore=options["ignore"], spacing_mm=None))

    return [score(mask, one) - score(view.mask(one, SOURCE), one) for one, mask in masks.items()]


def tell(question: Question, draws: Sequence[Draw], ids: Sequence[str], picture: Path | None) -> None:
    """Print gain against labelled patients, and draw it."""
    views = next(name for name in question.new.ladders if name.startswith("views"))
    found: dict[str, dict[int, list[list[float]]]] = {name: {} for name in METHODS}
    for draw in draws:
        for name in METHODS:
            found[name].setdefault(draw.size, []).append(gains(question, draw.masks(name, views, ids)))
    labelled = question.cases("calibration")
    many, shipped = len({one.cluster or one.id for one in labelled}), question._shipped(None)
    whole: dict[str, Mapping[str, Mask]] = {
        METHODS[0]: {one: question.mask("tuned", "1", one) for one in ids},
        METHODS[1]: judged_views(question, views, [one.id for one in labelled], ids),
        METHODS[2]: {one: shipped.masks(one) for one in ids},
    }
    for name, masks in whole.items():
        found[name][many] = [gains(question, masks)]
    entries = question.new.ladder(views).entries
    clusters = [entries[one].cluster or one for one in ids]
    print(f"\n### {question.shift.name}: {len(ids)} new cases of {len(set(clusters))} patients\n")
    print("| labelled patients | what | draws | gain [95 %, t by patient] | by draw | hurt by > .01, mean |")
    print("|---|---|---|---|---|---|")
    drawn: dict[str, list[tuple[int, float, float, float, list[float]]]] = {name: [] for name in METHODS}
    for name in METHODS:
        for size, rows in sorted(found[name].items()):
            mean, low, high = mean_low(np.mean(rows, axis=0), clusters, level=LEVEL)
            each = [float(np.mean(row)) for row in rows]
            hurt = float(np.mean([(np.array(row) < -POINT).sum() for row in rows]))
            drawn[name].append((size, mean, low, high, each))
            single = ", ".join(f"{one:+.4f}" for one in each)
            print(f"| {size} | {name} | {len(rows)} | {mean:+.4f} [{low:+.4f}, {high:+.4f}] | {single} | {hurt:.1f} |")
    (question.out / "question" / "curve" / f"{question.shift.name}.json").write_text(json.dumps(drawn, indent=1))
    if picture is not None:
        draw_curve(drawn, picture)


def draw_curve(drawn: Mapping[str, Sequence[tuple[int, float, float, float, list[float]]]], picture: Path) -> None:
    """Write the learning curve as SVG: means with bands by patient, one dot for each draw."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "casewise", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    for (name, points), color in zip(drawn.items(), COLORS, strict=True):
        sizes, means, lows, highs, each = zip(*points, strict=True)
        axes.plot(sizes, means, color=color, marker="o", label=name)
        axes.fill_between(sizes, lows, highs, color=color, alpha=0.13, linewidth=0)
        for size, values in zip(sizes, each, strict=True):
            axes.scatter([size] * len(values), values, color=color, s=9, alpha=0.6)
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set(xlabel="labelled patients", ylabel="gain in Dice on new patients")
    axes.set_xticks([point[0] for point in next(iter(drawn.values()))])
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    """Learn from a few patients at a time, and print the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shift", nargs="?", default=SHIFT, help=f"hearts, polyps-0, ...; default: {SHIFT}")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--draws", type=int, default=3, help="draws of patients for each number")
    parser.add_argument("--every", type=int, default=1, help="score every second, third, ... new patient")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="SVG to write")
    options = parser.parse_args()
    os.environ.setdefault("nnUNet_compile", "f")
    sys.path.insert(0, str(HOME.parent))
    torch.set_num_threads(1)
    data, out = options.data.resolve(), options.out.resolve()
    shift = shifts((options.weights or data.parent / "weights").resolve(), out)[options.shift]
    question = Question(shift, data, out, options.jobs)
    print_small(out)
    new = question.cases("development")
    patients = sorted({one.cluster or one.id for one in new})[:: options.every]
    ids = [one.id for one in new if (one.cluster or one.id) in patients]
    many = len({one.cluster or one.id for one in question.cases("calibration")})
    sizes = [size for size in PATIENTS if size < many]
    draws = [Draw(question, size, number) for number in range(options.draws) for size in sizes]
    for draw in draws:
        draw.learn()
        draw.read(ids)
    tell(question, draws, ids, options.picture)


if __name__ == "__main__":
    main()
