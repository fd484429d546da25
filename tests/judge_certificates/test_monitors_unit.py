"""Monitors: alarms when they should, silence when not, and a state that survives restarts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch, Refused
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.monitors.audits import Audit, agrapa_stakes, audit_of
from casewise.judge.monitors.exchangeability import AUDITED, Exchangeability, GoLive, two_sample_p
from casewise.judge.monitors.watch import (
    WATCHED,
    Watch,
    active_policy,
    calibration_numbers,
    read_watch,
    start_watch,
    write_watch,
)
from casewise.judge.policy import READY, write_policy

RUN = CliRunner()


def fed(monitor, losses):
    for loss in losses:
        monitor = monitor.seen(loss)
    return monitor


def test_an_audit_alarms_when_every_case_is_harmed():
    monitor = fed(Audit(0.1, 0.05), [1.0] * 10)
    assert monitor.alarm
    assert monitor.alarm_at == 5


def test_an_audit_without_losses_never_alarms():
    assert not fed(Audit(0.1, 0.05), [0.0] * 500).alarm


def test_an_alarm_stays_raised():
    first = fed(Audit(0.1, 0.05), [1.0] * 10)
    assert fed(first, [0.0] * 200).alarm_at == first.alarm_at


def test_stakes_come_from_the_past_only_and_are_truncated():
    assert agrapa_stakes([0.15] * 500, 0.1)[-1] == pytest.approx(0.5 / 0.1)
    assert agrapa_stakes([1.0] * 500, 0.1)[-1] == pytest.approx(1 / 0.9, rel=0.01)
    assert agrapa_stakes([0.0] * 50, 0.1)[-1] == 0.0


@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_a_drifting_coordinate_suspends_in_both_directions(shift):
    rng = np.random.default_rng(2)
    monitor = Exchangeability(tuple(rng.normal(size=40)), 0.05)
    for t in range(60):
        monitor = monitor.seen(f"c{t}", rng.normal() + shift)
    assert monitor.alarm
    assert monitor.alarm_at < 40


def test_conformal_p_values_count_what_is_larger():
    monitor = Exchangeability((1.0, 2.0, 3.0))
    assert 0 < monitor.p_value("a", 9.0) <= 0.25
    assert 0.75 < monitor.p_value("a", 0.0) <= 1
    assert 0.25 < monitor.p_value("a", 2.0) <= 0.75  # ties are broken by chance


def test_equal_coordinates_raise_no_alarm():
    monitor = Exchangeability((0.0,) * 20, 0.05)
    for t in range(200):
        monitor = monitor.seen(f"c{t}", 0.0)
    assert not monitor.alarm


def test_the_tie_break_of_a_case_is_always_the_same():
    one, two = (Exchangeability((1.0, 2.0), seed=3).p_value("case", 1.5) for _ in range(2))
    assert one == two


def test_impossible_observations_are_refused():
    with pytest.raises(BadInput, match=r"must be in \[0, 1\], got 1.5"):
        Audit(0.1).seen(1.5)
    with pytest.raises(BadInput, match="must be finite"):
        Exchangeability((1.0,)).seen("a", float("nan"))
    with pytest.raises(BadInput, match="finite calibration coordinates"):
        Exchangeability(())


def test_nan_is_no_decision_and_no_audit_whatever_is_watched():
    watch = Watch("id").decision("a", {"value": 0.1}, "ann").audit("a", 0.0, "ann")
    with pytest.raises(BadInput, match=r"value of case b .* and no NaN"):
        watch.decision("b", {"value": float("nan")}, "ann")
    with pytest.raises(BadInput, match=r"must be in \[0, 1\], got nan"):
        watch.audit("b", float("nan"), "ann")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_without_a_number_are_named_and_count_for_nothing(site, tmp_path, kind):
    rows = [("a", "0.1", ""), ("b", "nan", ""), ("c", "", ""), ("d", "", "nan"), ("e", "", "0.0"), ("f", "nan", "0.0")]
    stream = tmp_path / f"s.{kind}"
    if kind == "csv":
        stream.write_text("case,value,loss\n" + "".join(",".join(row) + "\n" for row in rows))
    else:
        kept = [{"case": name, "value": value or None, "loss": loss or None} for name, value, loss in rows]
        stream.write_text("".join(json.dumps(row) + "\n" for row in kept).replace('"nan"', "NaN"))
    words = [stream, "--calibration", site.path, "--state", tmp_path / "watch.json", "--monitors", "exchangeability"]
    told = RUN.invoke(app, ["monitor", *map(str, words), "--json"])
    content = json.loads(told.stdout)
    assert (content["decisions"], content["audits"]) == (1, 2)
    assert content["passed_over"] == ["b", "c", "d", "f"]
    told = RUN.invoke(app, ["monitor", *map(str, words)])
    assert "! 4 rows have NaN or no number and were skipped: b, c, d, f" in told.stdout


def test_a_watch_survives_a_restart_and_counts_a_case_once(site, tmp_path):
    certificate, policy = certify_router(site.archive, site.policy, Promise(("ha",), (0.1,)))
    kinds = ("exchangeability", "go-live", "audit")
    watch = start_watch(site.archive, policy, kinds, certificate=certificate)
    for t in range(5):
        watch = watch.decision(f"n{t}", {"value": 0.01 * t, "foreground": 0.1}).audit(f"n{t}", 0.1)
    again = read_watch(write_watch(tmp_path / "watch.json", watch))
    assert again == watch
    assert again.decision("n0", {"value": 5.0}) is again
    assert again.audit("n0", 1.0) is again
    assert not list(tmp_path.glob("*.tmp"))


def test_a_suspended_policy_deploys_m0(site):
    watch = start_watch(site.archive, site.policy)
    assert active_policy(site.policy, watch) is site.policy
    for t in range(80):
        watch = watch.decision(f"far{t}", {"value": 5.0 + t})
    assert watch.suspended
    fallen = active_policy(site.policy, watch)
    assert fallen.controller == "m0"
    assert "calibration no longer applies" in fallen.options["reason"]


def test_a_watch_of_another_calibration_is_refused(site):
    with pytest.raises(Mismatch, match="start a new watch after recalibration"):
        active_policy(site.policy, Watch("another calibration"))


def test_a_damaged_state_says_so(tmp_path):
    (tmp_path / "w.json").write_text("[]")
    with pytest.raises(BadInput, match=r"w\.json should hold a JSON object, got list; start a new one"):
        read_watch(tmp_path / "w.json")


def test_the_audit_alarm_needs_a_promise(site):
    with pytest.raises(BadInput, match="needs the promised risk"):
        start_watch(site.archive, site.policy, ("audit",))


def test_monitor_from_the_command_line_continues_where_it_stopped(site, tmp_path):
    values = calibration_numbers(site.archive, site.policy)["value"]
    calm = tmp_path / "decisions.jsonl"
    calm.write_text("".join(json.dumps({"case_id": f"a{t}", "value": values[t]}) + "\n" for t in range(20)))
    words = ["--state", str(tmp_path / "w.json")]
    first = RUN.invoke(app, ["monitor", str(calm), *words, "--calibration", str(site.path)], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    assert "20 decisions (20 patients) and 0 audits" in first.output
    assert "exchangeability: silent" in first.output
    assert "exchangeability/foreground: these cases have no such number" in first.output  # not "silent"
    drifted = tmp_path / "later.csv"
    drifted.write_text("case,value,loss\n" + "".join(f"b{t},{1 + t},\n" for t in range(60)))
    second = RUN.invoke(app, ["monitor", str(drifted), *words], catch_exceptions=False)
    assert second.exit_code == 1
    assert "80 decisions" in second.output
    assert "ALARM after" in second.output
    assert "Every case gets M0" in second.output


def test_monitor_without_a_state_or_calibration_says_what_is_missing(tmp_path):
    (tmp_path / "s.csv").write_text("case,value\n")
    with pytest.raises(BadInput, match="give --calibration"):
        RUN.invoke(app, ["monitor", str(tmp_path / "s.csv"), "--state", str(tmp_path / "w")], catch_exceptions=False)


def test_a_patient_without_a_name_counts_by_case_and_at_once():
    watch = Watch("id", {"audit": Audit(0.1)}).audit("a", 1.0)
    assert watch.monitors["audit"].losses == (1.0,)
    assert watch.waiting is None


def test_the_audits_of_a_patient_wait_for_the_next_patient(tmp_path):
    watch = Watch("id", {"audit": Audit(0.1)}).audit("a1", 1.0, "a").audit("a2", 0.0, "a")
    assert watch.monitors["audit"].losses == ()
    watch = read_watch(write_watch(tmp_path / "w.json", watch))
    watch = watch.audit("b1", 0.0, "b")
    assert watch.monitors["audit"].losses == (0.5,)
    assert watch.audit("a3", 1.0, "a").monitors == watch.monitors  # a has counted


def test_the_calibration_pool_holds_one_coordinate_per_patient(site):
    clusters = {entry.cluster for entry in site.archive.entries.values()}
    assert len(calibration_numbers(site.archive, site.policy)["value"]) == len(clusters) == len(site.archive.ids) // 2


def test_an_audit_alarm_voids_the_certificate_and_may_suspend(site):
    for asked in (False, True):
        watch = start_watch(site.archive, site.policy, ("audit",), limit=0.1, suspend_on_harm=asked)
        assert watch.void is None
        for t in range(10):
            watch = watch.audit(f"n{t}", 1.0)
        assert "the certificate is void: the audit alarm was raised" in watch.void
        policy = active_policy(site.policy, watch)
        assert (policy.controller == "m0") == watch.suspended == asked
        if asked:
            assert policy.options["reason"] == AUDITED


def test_a_go_live_test_is_asked_once_and_suspends(site):
    pool = calibration_numbers(site.archive, site.policy)["value"]
    watch = start_watch(site.archive, site.policy, ("go-live",), first=5)
    for t in range(5):
        watch = watch.decision(f"far{t}", {"value": max(pool) + 1 + t})
    assert watch.alarms == {"go-live": 5}
    assert watch.suspended
    calm = GoLive(pool, first=5)
    for t in range(5):
        calm = calm.seen(sorted(pool)[3 * t])
    assert not calm.alarm
    assert calm.seen(1e9) is calm


def test_two_samples_are_compared_by_their_distributions():
    # 3 values below 3 others: of the 20 ways to deal six places, two are as far apart (these and their mirror image)
    assert two_sample_p([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(0.1, abs=0.02)
    assert two_sample_p([0.0] * 5, [0.0] * 5) == 1.0


def test_clusters_reach_the_monitors_from_the_command_line(site, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("case,cluster,value\n" + "".join(f"c{t},p{t // 3},0.01\n" for t in range(12)))
    words = [
        "monitor",
        str(rows),
        "--state",
        str(tmp_path / "w.json"),
        "--calibration",
        str(site.path),
        "--set",
        "first=3",
    ]
    shown = RUN.invoke(app, words, catch_exceptions=False).output
    assert "12 decisions (4 patients)" in shown
    watch = read_watch(tmp_path / "w.json")
    assert len(watch.monitors["go-live"].stream) == 3
    assert len(watch.monitors["exchangeability"].stream) == 4


def test_what_is_not_a_watched_number_is_refused():
    with pytest.raises(BadInput, match="must be one of value, agreement, foreground"):
        Watch("id").decision("a", {"vaule": 0.1})


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    from worlds.candidates import views_archive

    return views_archive(tmp_path_factory.mktemp("views") / "a", cases=16, per_cluster=2)


@pytest.mark.parametrize(("design", "flag"), [("default", 0.3), ("consensus", None), ("m0", None)])
def test_whatever_calibrate_deploys_can_be_watched_by_default(views, tmp_path, design, flag):
    policy = READY["m0"] if design == "m0" else calibrate(views, design, flag_below=flag, confidence=0.8)
    assert (policy.controller == "m0") == (design != "consensus")  # the default keeps M0 here, and flags it
    write_policy(tmp_path / "p.json", policy)
    words = ["--calibration", views.path, "--policy", tmp_path / "p.json", "--state", tmp_path / "w.json"]
    told = RUN.invoke(app, ["monitor", *map(str, words)], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    assert "No monitor sees" in told.output
    kept = read_watch(tmp_path / "w.json").monitors
    known = {"default": WATCHED[1:], "consensus": WATCHED, "m0": ("foreground",)}[design]
    assert set(kept) == {k if n == "value" else f"{k}/{n}" for k in ("exchangeability", "go-live") for n in known}
    assert sum(one.delta for name, one in kept.items() if name.startswith("go-live")) == pytest.approx(0.05)


def test_a_fall_that_the_value_does_not_show_is_seen_in_the_foreground(views):
    policy = calibrate(views, "consensus")
    watch = start_watch(views, policy, ("go-live",), first=8)
    pools = calibration_numbers(views, policy)
    for t in range(8):
        numbers = {name: pool[t] for name, pool in pools.items()}
        watch = watch.decision(f"n{t}", {**numbers, "foreground": 0.001 * t})
    assert list(watch.alarms) == ["go-live/foreground"]
    assert active_policy(policy, watch).controller == "m0"


def test_the_limit_of_an_audit_allows_for_the_uncertainty_of_crc(site):
    certificate, _ = certify_router(site.archive, site.policy, Promise(("harmed",), (0.2,), within="max"))
    audit = audit_of(certificate, 0.05)
    assert audit.limit > certificate.alpha
    assert audit.delta == 0.025
    tested = replace(certificate, method="ltt", delta=0.1)
    assert audit_of(tested, 0.05) == Audit(0.2, 0.05)
    with pytest.raises(Refused, match="one batch"):
        audit_of(replace(certificate, method="selection"), 0.05)
    with pytest.raises(Refused, match="nothing is certified"):
        audit_of(replace(certificate, cut=None), 0.05)
