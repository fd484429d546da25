"""One small study, built once: 26 evaluation cases of two groups, one of which tries to break out of the page."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from casewise.archive.store import Archive, open_archive
from casewise.core.errors import DegenerateTertiles
from casewise.core.records import Policy
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import write_policy
from casewise.report.study_report import build
from casewise.study.study import Study
from worlds.cohorts import synthetic_archive

HOSTILE = "<img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class Sources:
    """Two archives and a policy."""

    evaluation: Archive
    calibration: Archive
    policy: Policy


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    root = tmp_path_factory.mktemp("study")
    groups = ("A", HOSTILE)
    calibration = synthetic_archive(root / "holdout", cases=16, seed=1, prefix="held", groups=groups)
    synthetic_archive(root / "stream", cases=26, seed=2, prefix="case", split="evaluation", groups=groups)
    file = root / "stream" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["configuration"]["names"] = {"0": "ground", "1": "<b>disc</b>", "2": "car"}
    manifest["configuration"]["notice"] = "Synthetic discs, not patients."
    file.write_text(json.dumps(manifest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        policy = calibrate(calibration, "cardiac")
    write_policy(calibration.path, policy)
    return Sources(open_archive(root / "stream"), calibration, policy)


@pytest.fixture(scope="session")
def study(sources: Sources) -> Study:
    return Study.of(sources.evaluation, sources.calibration, sources.policy, resamples=200)


@pytest.fixture(scope="session")
def page(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report"
    return build(
        sources.evaluation, sources.calibration, sources.policy, out, resamples=200, pictures=20, progress=False
    )
