"""Clinical measures of a study: volumes of what is deployed, beside M0 and the label."""

from __future__ import annotations

from dataclasses import replace

import pytest

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE
from casewise.measure.measures import measure
from casewise.study.analyses.clinical_measures import clinical, section
from casewise.study.study import Extras, Study


def test_volumes_are_counted_against_m0_and_the_label(study):
    row = clinical(study).row(measure="volume <b>disc</b> (1)")
    archive = study.evaluation
    decisions = {one.case_id: one for one in study.decisions[study.ours]}
    errors, changes = {}, {}
    for case_id, entry in archive.entries.items():
        source, label = archive.mask(case_id, SOURCE) == 1, archive.label(case_id) == 1
        chosen = archive.mask(case_id, decisions[case_id].state) == 1
        who = entry.cluster or case_id
        errors.setdefault(who, []).append(int(source.sum()) - int(label.sum()))
        changes.setdefault(who, []).append(int(chosen.sum()) - int(source.sum()))

    def by_patient(values):
        return sum(sum(each) / len(each) for each in values.values()) / len(values)

    assert row["error_m0"] == pytest.approx(by_patient(errors))
    assert row["change"] == pytest.approx(by_patient(changes))
    assert row["closer"] + row["farther"] <= row["patients"] == len(errors)


def test_a_declared_measure_is_there_and_an_unknown_label_is_refused(study):
    declared = replace(study, extras=Extras(measures=(measure("half", "volume(1) / 2", decision="< 40"),)))
    found = section(declared).findings[0].table.set_index("measure")
    assert found.loc["half", "change"] == pytest.approx(found.loc["volume <b>disc</b> (1)", "change"] / 2)
    with pytest.raises(BadInput, match=r"no label is called 'liver'.*write the number, such as volume\(1\)"):
        Study.of(study.evaluation, study.calibration, study.policy, extras=Extras(measures=(measure("x", "liver"),)))
