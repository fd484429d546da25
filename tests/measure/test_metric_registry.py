"""A metric is one file and one line; what is not in the list is refused when recording, not when calibrating."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.cohorts import synthetic_archive

from casewise.cli.import_ import import_
from casewise.core.errors import UnknownName
from casewise.judge.outcomes import outcomes
from casewise.measure.metrics import METRICS, Metric
from casewise.run.record_folder import record_folder


def test_recording_refuses_a_metric_that_nothing_could_score(tmp_path):
    with pytest.raises(UnknownName, match="no metric is called 'hd95'"):
        record_folder(None, None, tmp_path / "archive", metric="hd95")
    with pytest.raises(UnknownName, match="no metric is called 'hd95'"):
        import_(masks=tmp_path, labels=None, out=tmp_path / "archive", signals=None, groups=None, metric="hd95")
    assert not (tmp_path / "archive").exists()


def test_a_registered_metric_scores_archives(monkeypatch, tmp_path):
    def accuracy(mask, label, *, ignore, spacing_mm):
        assert spacing_mm == (1.0, 1.0)
        return float(np.mean(mask == label))

    monkeypatch.setitem(METRICS, "accuracy", Metric("accuracy", accuracy))
    archive = synthetic_archive(tmp_path / "archive", cases=3, steps=2, metric="accuracy")
    frame = outcomes(archive).set_index(["case", "step"])
    mask, label = archive.mask("case-0001", archive.states[1]), archive.label("case-0001")
    assert frame.loc[("case-0001", 1), "metric"] == pytest.approx(np.mean(mask == label))


def test_every_metric_rises_with_quality():
    label = np.zeros((6, 6), np.uint8)
    label[1:5, 1:5] = 1
    worse = label.copy()
    worse[1:3] = 0
    for name, metric in METRICS.items():
        right, wrong = (metric.of(mask, label, ignore=None, spacing_mm=None) for mask in (label, worse))
        assert right == 1.0 > wrong, name
