"""Monitors: alarms when they should, silence when not, and a state that survives restarts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch, TooFewCases
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.monitors.audits import (
    Audit,
    Proxy,
    Reference,
    agrapa_stakes,
    exceeds,
    lower_bound,
    proxy_threshold,
    upper_bound,
)
from casewise.judge.monitors.exchangeability import AUDITED, Exchangeability, GoLive, two_sample_p
from casewise.judge.monitors.watch import Watch, active_policy, coordinates, read_watch, start_watch, write_watch

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


def test_the_lower_bound_is_where_the_alarm_begins():
    losses = np.random.default_rng(0).binomial(1, 0.6, 60).tolist()
    low = lower_bound(losses, 0.05)
    assert 0.2 < low < 0.6
    assert exceeds(losses, low - 1e-6, 0.05)
    assert not exceeds(losses, low + 1e-6, 0.05)
    assert lower_bound([], 0.05) == 0.0
    assert upper_bound([0.0] * 30, 0.05) < 0.2


def test_a_reference_alarms_only_above_the_calibration_risk_and_its_tolerance():
    calm = [0.0, 0.1, 0.0, 0.2] * 10
    assert not fed(Reference.of(calm, delta=0.1), calm * 5).alarm
    assert fed(Reference.of(calm, delta=0.1), [0.9] * 30).alarm
    assert not fed(Reference.of(calm, delta=0.1, tolerance=0.5), [0.6] * 30).alarm


def test_a_proxy_threshold_separates_harm_where_the_coordinate_does():
    assert proxy_threshold([1, 2, 3, 4], [False, False, True, True]) == 2.0
    assert proxy_threshold([1, 2, 3, 4], [False] * 4) == 4.0


def test_a_proxy_alarms_when_exceedances_pile_up():
    rng = np.random.default_rng(1)
    values = rng.random(80)
    proxy = Proxy.of(values.tolist(), (values > 0.9).tolist(), delta=0.05)
    assert fed(proxy, [0.99] * 60).alarm
    assert not fed(proxy, rng.random(200)).alarm
    with pytest.raises(TooFewCases, match="at least 4 labelled patients or sequences, got 2"):
        Proxy.of([1, 2], [False, True])


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


def test_all_coordinates_equal_is_no_alarm():
    monitor = Exchangeability((0.0,) * 20, 0.05)
    for t in range(200):
        monitor = monitor.seen(f"c{t}", 0.0)
    assert not monitor.alarm


def test_the_same_case_has_the_same_luck():
    one, two = (Exchangeability((1.0, 2.0), seed=3).p_value("case", 1.5) for _ in range(2))
    assert one == two


def test_impossible_observations_are_refused():
    with pytest.raises(BadInput, match=r"lies in \[0, 1\], got 1.5"):
        Audit(0.1).seen(1.5)
    with pytest.raises(BadInput, match="must be finite"):
        Exchangeability((1.0,)).seen("a", float("nan"))
    with pytest.raises(BadInput, match="finite calibration coordinates"):
        Exchangeability(())


def test_nan_is_no_decision_and_no_audit_whatever_is_watched():
    watch = Watch("id").decision("a", 0.1, "ann").audit("a", 0.0, "ann")
    with pytest.raises(BadInput, match="must be finite, got nan for case b"):
        watch.decision("b", float("nan"), "ann")
    with pytest.raises(BadInput, match=r"lies in \[0, 1\], got nan"):
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
    words = [stream, "--calibration", site.path, "--state", tmp_path / "watch.json", "--no-go-live"]
    told = RUN.invoke(app, ["monitor", *map(str, words), "--json"])
    content = json.loads(told.stdout)
    assert (content["decisions"], content["audits"]) == (1, 2)
    assert content["passed_over"] == ["b", "c", "d", "f"]
    told = RUN.invoke(app, ["monitor", *map(str, words)])
    assert (
        "! 4 rows with NaN, or without value and loss, counted as no decision and no audit: b, c, d, f" in told.stdout
    )


def test_a_watch_survives_a_restart_and_counts_a_case_once(site, tmp_path):
    certificate, policy = certify_router(site.archive, site.policy, Promise(("ha",), (0.1,)))
    kinds = ("exchangeability", "audit", "reference", "proxy")
    watch = start_watch(site.archive, policy, kinds, limit=certificate.alpha)
    for t in range(5):
        watch = watch.decision(f"n{t}", 0.01 * t).audit(f"n{t}", 0.1)
    again = read_watch(write_watch(tmp_path / "watch.json", watch))
    assert again == watch
    assert again.decision("n0", 5.0) is again
    assert again.audit("n0", 1.0) is again
    assert not list(tmp_path.glob("*.tmp"))


def test_a_suspended_policy_deploys_m0(site):
    watch = start_watch(site.archive, site.policy)
    assert active_policy(site.policy, watch) is site.policy
    for t in range(80):
        watch = watch.decision(f"far{t}", 5.0 + t)
    assert watch.suspended
    fallen = active_policy(site.policy, watch)
    assert fallen.controller == "m0"
    assert "cut-points no longer apply" in fallen.options["reason"]


def test_a_watch_of_another_calibration_is_refused(site):
    with pytest.raises(Mismatch, match="start a new watch after recalibration"):
        active_policy(site.policy, Watch("another calibration"))


def test_a_damaged_state_says_so(tmp_path):
    (tmp_path / "w.json").write_text("[]")
    with pytest.raises(BadInput, match="is not a watch"):
        read_watch(tmp_path / "w.json")


def test_the_audit_alarm_needs_a_promise(site):
    with pytest.raises(BadInput, match="needs the promised risk"):
        start_watch(site.archive, site.policy, ("audit",))


def test_monitor_from_the_command_line_continues_where_it_stopped(site, tmp_path):
    values = coordinates(site.archive, site.policy)
    calm = tmp_path / "decisions.jsonl"
    calm.write_text("".join(json.dumps({"case_id": f"a{t}", "value": values[t]}) + "\n" for t in range(20)))
    words = ["--state", str(tmp_path / "w.json")]
    first = RUN.invoke(app, ["monitor", str(calm), *words, "--calibration", str(site.path)], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    assert "20 decisions (20 patients or sequences) and 0 audits" in first.output
    drifted = tmp_path / "later.csv"
    drifted.write_text("case,value,loss\n" + "".join(f"b{t},{1 + t},\n" for t in range(60)))
    second = RUN.invoke(app, ["monitor", str(drifted), *words], catch_exceptions=False)
    assert second.exit_code == 1
    assert "80 decisions" in second.output
    assert "ALARM after" in second.output
    assert "Deploying M0" in second.output


def test_monitor_without_a_state_or_calibration_says_what_is_missing(tmp_path):
    (tmp_path / "s.csv").write_text("case,value\n")
    with pytest.raises(BadInput, match="give --calibration ARCHIVE to start one"):
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
    assert len(coordinates(site.archive, site.policy)) == len(clusters) == len(site.archive.ids) // 2


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
    pool = coordinates(site.archive, site.policy)
    watch = start_watch(site.archive, site.policy, ("go-live",), first=5)
    for t in range(5):
        watch = watch.decision(f"far{t}", max(pool) + 1 + t)
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
    words = ["monitor", str(rows), "--state", str(tmp_path / "w.json"), "--calibration", str(site.path), "--first", "3"]
    shown = RUN.invoke(app, words, catch_exceptions=False).output
    assert "12 decisions (4 patients or sequences)" in shown
    watch = read_watch(tmp_path / "w.json")
    assert len(watch.monitors["go-live"].stream) == 3
    assert len(watch.monitors["exchangeability"].stream) == 4
