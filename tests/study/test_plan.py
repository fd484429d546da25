"""Plans: what they may say, how many patients they need, and what their seal shows."""

from __future__ import annotations

import os

import pytest
from scipy import stats
from worlds.updates import heart, update, write

import casewise
from casewise.core.chain import Chain
from casewise.core.errors import BadInput, CasewiseError
from casewise.study.plan import TEMPLATE, how_many, log_of, log_opened, read_plan, seal_plan


def written(root, text, name="plan.toml"):
    path = root / name
    path.write_text(text, encoding="utf-8")
    return path


def plan(root, criteria, protocol="", more=""):
    return read_plan(written(root, f"[protocol]\n{protocol}\n[protocol.criteria]\n{criteria}\n{more}"))


EF = '[measures.ef]\nformula = "volume(LV, ED) - volume(LV, ES)"\n'


def test_the_template_is_a_plan_and_each_commented_line_is_one_too(tmp_path):
    found = read_plan(written(tmp_path, TEMPLATE))
    assert [one.name for one in found.criteria] == ["max_mean_drop", "max_harmed_share"]
    assert found.patients == 40
    lines = TEMPLATE.splitlines()
    start = lines.index("[protocol.criteria]")
    opened = [line.removeprefix("# ") if "=" in line or line.startswith("# [") else line for line in lines[start:]]
    whole = read_plan(written(tmp_path, "\n".join([*lines[:start], *opened])))
    assert {"min_mean_gain", "max_error_rise", "max_crossed_share"} <= {one.name for one in whole.criteria}
    assert [str(one) for one in whole.measures[0].decisions] == ["< 40"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no criterion"),
        ("[protocol.criteria]\nmax_mean_drp = 0.1", "Did you mean 'max_mean_drop'"),
        ("[protocol.criteria]\nmax_ha = 3", "its limit must be from 0 to below 1"),
        ("[protocol.criteria]\nmax_harmed_share = 1", r"its limit must be from 0 to below 1 \(0.05 is 5 %\), got 1"),
        ("[protocol.criteria]\nmax_mean_drop = 1", "max_mean_drop must be from -1 to 1"),
        ("[protocol.criteria]\nmin_mean_gain = 2", "min_mean_gain must be from -1 to 1"),
        ("[protocol.criteria]\nmax_harmed_share = {limit = 0.1, margin = 5}", "margin must be from 0 to below 1"),
        ("[protocol.criteria]\nmax_flipped_share = {limit = 0.1, margin = 70}", "margin must be from 0 to below 1"),
        ("[protocol.criteria]\nmax_harmed_share = {limit = 0.1, margin = -0.05}", "margin must be from 0"),
        ('[protocol.criteria]\nmax_ha=0.1\n[measures.x]\nformula = "LV"\nunit = 5', "measure x takes formula, unit"),
        ("[protocol.criteria.measures.ef]\nmax_error_rise = 3", "measure 'ef', which the plan does not declare"),
        (f"[protocol.criteria.measures.ef]\nmax_ha = 0.1\n{EF}", "max_ha is not a criterion on a measure"),
        ("[protocol.criteria]\nmax_error_rise = 3", "is a criterion on a measure"),
        ('[protocol.criteria]\nmax_ha=0.1\n[measures]\nx = "__import__(1)"', "measure x: .*is not expected there"),
        (
            "[protocol]\npatients = 0\n[protocol.criteria]\nmax_ha = 0.1",
            "patients must be a whole number of at least 1",
        ),
        ("[protocol]\npatients = 5\n[protocol.criteria]\nmax_ha = 0.1", "5 patients can never show max_ha <= 0.1"),
        ("[protocol]\npatients = 5\n[protocol.criteria]\nmax_ha = 0", "no sample can show max_ha <= 0"),
        ("[protocol]\nconfidence = 2\n[protocol.criteria]\nmax_ha = 0.1", "or 'observed'"),
        ("[protocol.criteria]\nmin_mean_gain = 0.01\nmax_changed_share = 0", "lets no case change"),
        (
            "[protocol.criteria]\nmin_mean_gain = 0.01\nmax_mean_drop = -0.02",
            "asks for a larger gain than min_mean_gain = 0.01",
        ),
        ("[protocl]\n", "a plan has no 'protocl'"),
        ("[protocol]\npatient = 3", "\\[protocol\\] has no 'patient'"),
        ("protocol = 3", "must be a table"),
        ("[protocol.criteria]\nmax_mean_drop = {limit = 0.1, sd = 0}", "above 0"),
        ("[protocol.criteria.a.b.c]\nx = 1", "no criterion is called 'a'"),
        ("[", "is not TOML"),
        ("x = " + "[" * 5000, "is not TOML"),
        ("# " + "x" * (10 * 2**20), r"is 10\.0 MB; it may have at most 256 kB"),
        ("[protocol]\npatients = 1" + "0" * 5000, "is not TOML"),
        ("[protocol.criteria]\nmax_mean_drop = 1" + "0" * 400, "max_mean_drop must be a number or"),
        ("[protocol.criteria]\nmax_mean_drop = nan", "got nan"),
        ("[protocol.criteria]\nmax_ha = 0", "no sample can show max_ha <= 0"),
        ('[protocol.criteria]\nmax_ha=0.1\n[measures]\nx = "LV * 1e999"', "measure x"),
        ('[protocol.criteria]\nmax_ha=0.1\n[measures]\nx = "LV * True"', "measure x"),
        ('[protocol.criteria]\nmax_ha=0.1\n[measures.x]\nformula = "LV"\ndecision = "< 1e999"', "measure x"),
        ('[protocol.data]\nlabel = "ab"\n[protocol.criteria]\nmax_ha = 0.1', "has no 'label'; it has old, new, labels"),
        ('[protocol.data]\nnew = "ab"\n[protocol.criteria]\nmax_ha = 0.1', "data.new must be a sha256, .*got 'ab'"),
        ('[description]\nchange = ["a"]\n[protocol.criteria]\nmax_ha = 0.1', "description.change"),
    ],
)
def test_wrong_plans_get_one_clear_line(tmp_path, text, sentence):
    with pytest.raises(CasewiseError, match=sentence) as refused:
        read_plan(written(tmp_path, text))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_plan_that_is_not_there_says_how_to_get_one(tmp_path):
    with pytest.raises(BadInput, match="--new-plan") as refused:
        read_plan(tmp_path / "nowhere.toml")
    assert "Errno" not in str(refused.value)


def test_every_criterion_holds_for_each_subgroup_too(tmp_path):
    found = plan(tmp_path, "max_mean_drop = 0.01\nmax_ha = 0.3", 'subgroups = ["B"]')
    scopes = {(one.name, one.scope) for one in found.criteria}
    assert {("max_mean_drop", "group B"), ("max_ha", "group B"), ("max_ha", "all")} <= scopes


def test_the_number_of_patients_for_a_share_is_that_of_the_exact_binomial(tmp_path):
    (row,) = how_many(plan(tmp_path, "max_ha = {limit = 0.1, expected = 0.0}"))
    assert row.patients == 29  # 0.9 ** 29 < 0.05
    (row,) = how_many(plan(tmp_path, "max_ha = {limit = 0.1, expected = 0.02}"))
    harmed = next(k for k in range(9) if stats.beta.ppf(0.95, k + 2, row.patients - k - 1) > 0.1)
    assert stats.binom.cdf(harmed, row.patients, 0.02) >= 0.8
    (more,) = how_many(plan(tmp_path, "max_ha = {limit = 0.1, expected = 0.02}", "scans = 2"))
    assert more.patients > row.patients
    (never,) = how_many(plan(tmp_path, "max_ha = {limit = 0.1, expected = 0.2}"))
    assert never.patients is None


def test_the_number_of_patients_for_a_mean_is_that_of_the_t_test(tmp_path):
    rows = how_many(plan(tmp_path, "max_mean_drop = {limit = 0.01, sd = 0.02}\nmax_harmed_share = 0.9"), power=0.6)
    mean = rows[0].patients  # two criteria: each with a chance of 0.8
    for count, enough in ((mean, True), (mean - 1, False)):
        power = stats.nct.sf(stats.t.ppf(0.95, count - 1), count - 1, 0.5 * count**0.5)
        assert bool(power >= 0.8) is enough
    (unknown, _) = how_many(plan(tmp_path, "max_mean_drop = 0.01"))
    assert "give sd" in unknown.why
    (gain, _) = how_many(
        plan(tmp_path, "min_mean_gain = {limit = 0.0, expected = 0.01, sd = 0.02}\nmax_harmed_share=0.99")
    )
    assert gain.patients is not None


def sealed(root, text="[protocol.criteria]\nmax_ha = 0.5\n", **more):
    masks = [
        write(root / "new", name, heart()) for name in ("a", "b") if not (root / "new" / f"{name}.nii.gz").exists()
    ]
    masks = sorted((root / "new").iterdir())
    plan = read_plan(written(root, text))
    return log_opened(plan, seal_plan(plan, masks, **more))


def test_a_plan_is_sealed_before_the_masks_are_opened_and_stays_so(tmp_path):
    first = sealed(tmp_path)
    assert first.notes == ()
    again = sealed(tmp_path)
    assert (again.notes, again.time, again.sha256) == ((), first.time, first.sha256)
    log = Chain(log_of(tmp_path / "plan.toml"))
    assert [line["event"] for line in log.lines()] == ["plan-sealed", "new-opened", "new-opened"]
    assert log.problems == []


def test_a_plan_that_was_changed_after_the_first_look_is_named(tmp_path):
    sealed(tmp_path)
    (note,) = sealed(tmp_path, "[protocol.criteria]\nmax_ha = 0.9\n").notes
    assert "changed after the new masks were first opened" in note
    write(tmp_path / "new", "c", heart())  # other masks: the changed plan is in time for them
    assert sealed(tmp_path, "[protocol.criteria]\nmax_ha = 0.9\n").notes == ()


def test_a_plan_that_came_late_and_an_edited_log_are_named(tmp_path):
    (note,) = sealed(tmp_path, compared_before=True).notes
    assert "compared before the plan was sealed" in note
    assert sealed(tmp_path).notes == (note,)  # another -o does not make it forgotten
    log = log_of(tmp_path / "plan.toml")
    log.write_text(log.read_text().replace("plan-sealed", "plan-seale"))
    assert "the log of the plan was edited" in sealed(tmp_path).notes[0]


def test_folders_have_a_verdict_in_python_and_its_first_line_says_what_became_of_the_plan(tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    plain = casewise.compare(str(root / "old"), root / "new", labels=root / "labels")
    assert (plain.verdict, len(plain.cases), plain.summary["hurt"]) == ("compared", 4, 0)
    path = written(root, '[protocol]\nconfidence = "observed"\npatients = 3\n[protocol.criteria]\nmax_ha = 0.5\n')
    options = {"labels": root / "labels", "cases": root / "cases.csv", "plan": path}
    few = casewise.compare(root / "old", root / "new", **options)
    assert (few.verdict, few.exit_code, few.checks[-1].reason[:20]) == ("undecided", 5, "the plan needs 3 pat")
    path.write_text(path.read_text().replace("patients = 3", 'patients = 2\ndata.labels = "' + "a" * 64 + '"'))
    (root / "new" / "audit.jsonl").write_text("a log that grows does not make other masks of these\n")
    changed = casewise.compare(root / "old", root / "new", **options)
    assert changed.verdict == "accepted"
    assert "changed after" in changed.notes[0]
    assert "the labels differ from those of the plan" in changed.notes[1]
    path.write_text(path.read_text().replace("a" * 64, f'{changed.hashes["label"]}"\ndata.new = "{"b" * 64}'))
    assert (
        "the new masks differ from those of the plan"
        in casewise.compare(root / "old", root / "new", **options).notes[1]
    )
    path.write_text(path.read_text().replace(f'data.new = "{"b" * 64}"', ""))
    assert len(casewise.compare(root / "old", root / "new", **options).notes) == 1
    assert Chain(log_of(path)).lines()[-1]["verdict"] == "accepted"


def test_a_folder_that_holds_an_earlier_comparison_speaks_only_of_masks_that_were_there_then(tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    options = {"labels": root / "labels", "out": root / "out"}
    path = written(root, '[protocol]\nconfidence = "observed"\n[protocol.criteria]\nmax_ha = 0.5\n')
    casewise.compare(root / "old", root / "new", **options)
    assert "compared before" in casewise.compare(root / "old", root / "new", plan=path, **options).notes[0]
    later = (root / "out" / "cases.jsonl").stat().st_mtime + 60
    for mask in (root / "new").iterdir():  # the next version, after that comparison
        mask.write_bytes(mask.read_bytes() + b"\0")
        os.utime(mask, (later, later))
    assert casewise.compare(root / "old", root / "new", plan=path, **options).notes == ()
