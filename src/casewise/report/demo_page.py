"""demo.html: the results of fit and predict on the phantom hearts, in four sentences, a table and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from casewise.core.durable import write_durably
from casewise.core.prediction_record import PredictedCase
from casewise.core.text import pluralize
from casewise.data import nifti
from casewise.data.splits import Cohort
from casewise.measure.metrics.overlap import dice
from casewise.render.ink import POINT, change_svg
from casewise.render.mask_pictures import Classes, before_after, data_uri, legend, sheet_png
from casewise.report.fit_page import design_words
from casewise.report.page import render_page

PAGE, PICTURE = "demo.html", "masks.png"
WAYS = {"views": "mean of the views", "tuned": "tuned weights"}


@dataclass(frozen=True)
class ScoredHeart:
    """One new heart: the Dice of every mask, and the decision."""

    case: str
    dice: dict[str, float]  # Dice by way: m0, deployed, and the ways of WAYS
    rolled_back: bool
    flagged: bool
    other: bool  # True: a heart of the third scanner

    def change(self, way: str = "deployed") -> float:
        """Return the change of Dice against M0."""
        return self.dice[way] - self.dice["m0"]

    @property
    def rollback_sentence(self) -> str:
        """Say whose mask was rolled back in the second row of pictures, and whether that was right."""
        whose = "a heart of the third scanner" if self.other else "a heart"
        right = "the better one" if self.change("tuned") < 0 else "the worse one: a choice without labels can be wrong"
        return f"In the second row {whose} kept its original mask, here {right}."


@dataclass(frozen=True)
class DemoFacts:
    """All facts of the demo page."""

    hearts: tuple[ScoredHeart, ...]
    home: float  # Dice of the model on its own scanner
    fit: dict[str, Any]  # fit.json
    certificate: dict[str, Any] | None

    @property
    def same(self) -> tuple[ScoredHeart, ...]:
        """The hearts of the scanner that the labels come from."""
        return tuple(one for one in self.hearts if not one.other)

    def row(self, way: str) -> dict[str, Any]:
        """Summarize one way over the hearts of the labelled scanner."""
        changes = [one.change(way) for one in self.same]
        return {
            "dice": fmean(one.dice[way] for one in self.same), "gain": fmean(changes),
            "better": sum(one > 0 for one in changes), "worse": sum(one < 0 for one in changes),
            "lost": sum(one < -POINT for one in changes), "worst": min(changes),
        }  # fmt: skip

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """One row per way, by its name for a person."""
        chosen = self.fit["preflight"]["comparison"]["chosen"]
        named = {"m0": "original model (M0)", **WAYS, "deployed": f"casewise: {design_words(chosen)}"}
        return {said: self.row(way) for way, said in named.items() if way in self.same[0].dice}

    @property
    def sentences(self) -> list[str]:
        """Summarize the results in four sentences."""
        m0, ours, n = self.row("m0"), self.row("deployed"), len(self.same)
        compared, learners = self.fit["preflight"]["comparison"], self.fit["patients"]
        back, flagged = (sum(getattr(one, name) for one in self.same) for name in ("rolled_back", "flagged"))
        third = [one for one in self.hearts if one.other]
        held = sum(one.rolled_back and one.flagged for one in third)
        return [
            f"The model is worse on another scanner: its mean Dice is {self.home:.3f} on the scanner of its training "
            f"images and {m0['dice']:.3f} on {n} new hearts from another scanner.",
            f"{self._views()} casewise fit tuned the model on {learners} labelled hearts, compared "
            f"{len(compared['rows'])} ways and chose {design_words(compared['chosen'])}: {ours['dice']:.3f}.",
            f"{self._harm()} Without labels, casewise flags {flagged} of {n} hearts for a person to check and keeps "
            f"the original mask of {back or 'none'}; of {pluralize(len(third), 'heart')} of a third scanner it keeps "
            f"the original mask of {held} and flags {'it' if held == 1 else 'them'}, as unlike the labelled hearts.",
            self._promise(ours["lost"], n),
        ]

    def _views(self) -> str:
        if "views" not in self.same[0].dice:
            return "Tuning on labelled hearts recovers some of the loss."
        views, ours = self.row("views")["dice"], self.row("deployed")["dice"]
        more = f"Tuning on labelled hearts {'recovers' if ours > views else 'does not recover'} more."
        return f"Views (the same model on transformed images) recover some of the loss: {views:.3f}. {more}"

    def _harm(self) -> str:
        """Return for each way how many hearts it makes worse and its mean gain, because one does not show the other."""
        made = {said: self.row(way) for way, said in WAYS.items() if way in self.same[0].dice}
        others = [
            f"; with the {said} alone {row['lost'] or 'none'}, for {row['gain']:+.3f}" for said, row in made.items()
        ]
        ours, n = self.row("deployed"), len(self.same)
        lost = f"{ours['lost'] or 'None'} of {n} hearts lose more than a point of Dice (0.01)"
        return f"{lost}, for a mean gain of {ours['gain']:+.3f}{''.join(others)}."

    def _promise(self, lost: int, n: int) -> str:
        if self.certificate is None:
            return "Nothing is promised: the labelled hearts that were set aside are too few or show too much harm."
        alpha, units = self.certificate["alpha"], self.certificate["units"]
        kept = "the promise was kept" if lost <= alpha * n else "more than promised; the promise is an average"
        return (
            f"With {units} other labelled hearts casewise promised that at most {alpha:.0%} of new hearts lose more "
            f"than a point; {lost} of {n} did: {kept}."
        )

    def as_plain(self) -> dict[str, Any]:
        """Return the facts as JSON types."""
        hearts = [asdict(one) for one in self.hearts]
        return {"sentences": self.sentences, "home": self.home, "rows": self.rows, "hearts": hearts}


def demo_facts(cohort: Cohort, entries: Sequence[PredictedCase], out: Path, *, home: float) -> DemoFacts:
    """Score every mask that predict wrote for the new hearts.

    Args:
        cohort: The new hearts, with labels.
        entries: Records of predict.
        out: Folder of the demo.
        home: Dice of the model on its own scanner.
    """
    folder, certificate = out / "deployment", out / "deployment" / "certificate.json"
    hearts = []
    for entry in entries:
        label, made = cohort.label(entry.case), _masks(out / "masks", entry)
        decision = entry.decision
        hearts.append(
            ScoredHeart(
                entry.case, {way: dice(nifti.read_label(path), label) for way, path in made.items()},
                decision is not None and decision.rolled_back, decision is not None and decision.flagged,
                "_C_" in entry.case,
            )
        )  # fmt: skip
    promised = json.loads(certificate.read_text(encoding="utf-8")) if certificate.is_file() else None
    return DemoFacts(tuple(hearts), home, json.loads((folder / "fit.json").read_text(encoding="utf-8")), promised)


def _masks(masks: Path, entry: PredictedCase) -> dict[str, Path]:
    """Return the mask files of a case: M0, the deployed mask, the mean of the views and the tuned prediction."""
    own, ending = f"casewise/candidates/{entry.case}/", ".nii.gz"
    ladders: dict[str, dict[int, str]] = {}
    for name in entry.outputs:
        if name.startswith(own):
            ladder, _, step = name.removeprefix(own).removesuffix(ending).rpartition("/")
            ladders.setdefault(ladder, {})[int(step)] = name
    unnamed = next((name for name in entry.policy.get("ladders", ()) if name not in ladders), "")
    ladders = {ladder or unnamed: steps for ladder, steps in ladders.items()}
    source, mask = f"casewise/source/{entry.case}{ending}", f"{entry.case}{ending}"
    found = {"m0": source if source in entry.outputs else mask, "deployed": mask}
    for ladder, steps in ladders.items():
        if ladder.startswith("views"):
            found["views"] = steps[max(steps)]
        elif ladder == "tuned" and 1 in steps:
            found["tuned"] = steps[1]
    return {way: masks / name for way, name in found.items()}


def write_demo(facts: DemoFacts, cohort: Cohort, out: Path) -> Path:
    """Write demo.html and masks.png into the folder of the demo; return the page."""
    classes = Classes(dict(enumerate(cohort.classes)))
    good = sorted(facts.same, key=lambda one: one.dice["deployed"])[len(facts.same) // 2 :]
    gained = max(good, key=ScoredHeart.change)
    undone = [one for one in facts.hearts if one.rolled_back and "tuned" in one.dice]
    undone = sorted(undone, key=lambda one: one.change("tuned"))[:1]
    rows = []
    for heart, ways in [(gained, ("m0", "deployed")), *((one, ("tuned", "deployed")) for one in undone)]:
        label, image = cohort.label(heart.case), cohort.case(heart.case).image
        entry = PredictedCase.from_dict(json.loads((out / "masks" / "casewise" / f"{heart.case}.json").read_text()))
        files = _masks(out / "masks", entry)
        pictures = before_after(image, [nifti.read_label(files[way]) for way in ways], label, classes)
        said = {
            "m0": "original mask", "tuned": "new mask, rolled back",
            "deployed": "original mask stays" if heart.rolled_back else "new mask",
        }  # fmt: skip
        rows.append(
            [(f"{said[way]}, Dice {heart.dice[way]:.2f}", one) for way, one in zip(ways, pictures, strict=True)]
        )
    write_durably(out / PICTURE, sheet_png([[panel for row in rows for panel in row]], side=264))
    changes = [(one.case, one.dice["m0"], one.dice["deployed"]) for one in facts.hearts]
    text = render_page(
        "demo.html.j2", facts=facts, notice=cohort.notice, changes=Markup(change_svg(changes, metric="Dice")),
        pictures=[[(said, data_uri(picture)) for said, picture in row] for row in rows],
        legend=legend(classes.names, background=True), undone="".join(one.rollback_sentence for one in undone),
    )  # fmt: skip
    write_durably(out / PAGE, text.encode())
    return out / PAGE
