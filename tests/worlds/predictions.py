"""A prediction folder as ``casewise predict`` leaves one, of phantom hearts and without a network, and its server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, replacing, write_durably
from casewise.core.formats import json_bytes
from casewise.core.prediction_record import SCHEMA
from casewise.core.records import SOURCE, Action, Decision, Mask, State
from casewise.data import nifti, pictures
from casewise.data.phantom import cardiac_cohort
from casewise.measure.signals.fragmentation import fragmentation
from casewise.run.prediction_folder import Layout
from casewise.serve.review_log import ReviewLog
from casewise.serve.review_server import ReviewServer, review_server

CUTS = {"cut_low": 0.05, "cut_high": 0.3}


def blob(mask: Mask, at: tuple[int, ...], size: int, label: int) -> Mask:
    """A copy of a mask with a box of a label in it."""
    found = mask.copy()
    found[tuple(slice(place, place + size) for place in at)] = label
    return found


class Folder:
    """Writes cases into a prediction folder one by one."""

    def __init__(self, out: Path, ending: str = ".nii.gz") -> None:
        self.layout = Layout(out, ending)
        self.images = out.parent / "images"
        self.images.mkdir(parents=True, exist_ok=True)
        if not self.layout.audit.exists():
            Chain(self.layout.audit).append("run-started", {"adaptation": {"min_area": 4}})

    def image(self, case_id: str, values: Any) -> Path:
        if self.layout.ending == ".png":
            path = self.images / f"{case_id}.png"
            pictures.write_label_picture(path, values)
            return path
        path = self.images / f"{case_id}_0000.nii.gz"
        nibabel.save(nibabel.Nifti1Image(values.T.astype(np.float32), np.diag([1.0, 1.0, 4.0, 1.0])), path)
        return path

    def add(
        self, case_id: str, image: Any, source: Mask, adapted: Mask, *, value: float, candidates: bool = True
    ) -> None:
        """One case with a router's decision on ``value``."""
        path = self.image(case_id, image)
        keeps = value < CUTS["cut_high"]
        deployed = adapted if keeps else source
        wanted = {self.layout.mask(case_id): deployed}
        if keeps:
            wanted[self.layout.source(case_id)] = source
        if candidates:
            folder = self.layout.candidates(case_id)
            wanted |= {folder / f"{step}{self.layout.ending}": mask for step, mask in enumerate((source, adapted))}
        for place, mask in wanted.items():
            with replacing(place) as temporary:
                self._mask(temporary, mask, path)
        decision = Decision(
            case_id, Action.KEEP if keeps else Action.ROLLBACK, State(1) if keeps else SOURCE, 1, "router",
            bucket="low" if keeps else "hard", coordinate="delta_foreground", value=value, **CUTS,
            reason=f"delta_foreground {value} was read",
        )  # fmt: skip
        signals = {"0": {"regions": 0.0}, "1": fragmentation(source, adapted, min_area=4).as_signals()}
        outputs = {str(place.relative_to(self.layout.out)): file_sha256(place) for place in wanted}
        self.entry(
            case_id, status="done", decision=decision.as_dict(), signals=signals, outputs=outputs,
            inputs={path.name: file_sha256(path)},
        )  # fmt: skip

    def entry(self, case_id: str, **facts: Any) -> None:
        plain: Mapping[str, Any] = {"schema": SCHEMA, "case": case_id, "outputs": {}, "inputs": {}, **facts}
        write_durably(self.layout.entry(case_id), json_bytes(plain))
        digest = file_sha256(self.layout.entry(case_id))
        Chain(self.layout.audit).append("case", {"case": case_id, "status": facts["status"], "entry": digest})

    def _mask(self, path: Path, mask: Mask, image: Path) -> None:
        if self.layout.ending == ".png":
            pictures.write_label_picture(path, mask)
        else:
            nifti.write_mask(path, mask, nifti.read_volume(image).geometry)


def hearts(out: Path) -> Folder:
    """Four hearts: a small edit that is kept, a large one that is rolled back, one without candidates, one failed."""
    folder = Folder(out)
    cohort = cardiac_cohort("B", 3, split="evaluation")
    for case_id, name, value in zip(cohort.ids, ("kept", "undone", "unsaved"), (0.1, 0.9, 0.2), strict=True):
        image, source = cohort.case(case_id).image[0], cohort.label(case_id)
        middle = source.shape[0] // 2
        adapted = blob(source, (middle, 8, 8), 2 if name == "kept" else 3, 1)
        if name == "undone":
            adapted = blob(blob(adapted, (1, 70, 12), 10, 2), (middle, 40, 40), 9, 0)
            adapted[middle + 1][(adapted[middle + 1] == 2)] = 3
        folder.add(name, image, source, adapted, value=value, candidates=name != "unsaved")
    folder.entry("broken", status="failed", error="the file is <b>truncated</b>", error_kind="BadInput")
    return folder


@contextmanager
def serving(*arguments: Any, **options: Any) -> Iterator[ReviewServer]:
    with review_server(*arguments, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def decisions_of(log: Path) -> dict[str, str]:
    """The last decision of a reviewer on each case."""
    return {case: line["decision"] for case, line in ReviewLog(log).latest().items()}
