"""Several ladders from the command line: policies over all of them, and every command on one of them by its name."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive
from worlds.tiny_models import write_unet, write_volumes

from casewise.archive.store import Archive, create_archive, open_archive
from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Case, State
from casewise.judge.ledger import LEDGER
from casewise.judge.policy import read_policy
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.overlap import dice
from casewise.replay import replay
from casewise.study.study import Study

FACTORY = "casewise.adapt.networks:PlainUNet"
VIEWS, TENT = "some=views:gamma(1.4),mirror(x)", "tent"
CASES = 6


def call(command: str, *arguments: object) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)


def model(home: Path) -> tuple[object, ...]:
    return ("-m", FACTORY, "--weights", home / "unet.safetensors", "-device", "cpu")


def recorded(home: Path, archive: Path, *more: object) -> Any:
    updates = ("--steps", 2, "--lr", 0.01) if any("tent" in str(word) for word in more) else ()
    done = call("record", *model(home), "-i", home / "images", "-o", archive, "--set", "min-area=1", *updates, *more)
    assert done.exit_code == 0, done.output
    return done


def saved(file: Path) -> Any:
    return np.asarray(nibabel.load(file).dataobj).T  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six cases whose truth is near the mean of the views, and an archive of two ladders."""
    folder = write_volumes(tmp_path_factory.mktemp("ladders"), cases=CASES)
    write_unet(folder / "unet.safetensors")
    recorded(folder, folder / "unlabelled", "--propose", VIEWS)
    truth = open_archive(folder / "unlabelled")
    for case_id in truth.ids:
        label = truth.mask(case_id, State(3)).copy()
        label[:, :2] = 1  # no candidate is right everywhere
        nibabel.save(nibabel.Nifti1Image(label.T, np.eye(4)), folder / "labels" / f"{case_id}.nii.gz")
    labels = ("-l", folder / "labels")
    recorded(folder, folder / "both", *labels, "--propose", VIEWS, "--propose", TENT)
    return folder


def calibrated(home: Path, policy: str, file: Path, *more: object) -> Any:
    both = ("--ladder", "some", "--ladder", "tent")
    done = call("calibrate", home / "both", "--policy", policy, *both, "-o", file, *more)
    assert done.exit_code == 0, done.output
    return read_policy(file)


# ---- one policy over several ladders ----


def test_a_part_of_a_recording_counts_its_own_cases(home: Path, tmp_path: Path) -> None:
    for part in (0, 1):
        more = ("--propose", "one=views:mirror(x)", "-num_parts", 2, "-part_id", part)
        said = recorded(home, tmp_path / "a", *more).output
        assert "3 of 3 cases" in said
        assert "6 of" not in said
    assert len(open_archive(tmp_path / "a").ids) == CASES


def test_an_archive_is_extended_from_a_folder_of_another_name(home: Path, tmp_path: Path) -> None:
    recorded(home, tmp_path / "a", "--propose", "one=views:mirror(x)")
    shutil.copytree(home / "images", tmp_path / "elsewhere")
    recorded(home, tmp_path / "a", "-i", tmp_path / "elsewhere", "--propose", "two=views:gamma(1.4)")
    extended = open_archive(tmp_path / "a")
    assert (len(extended.ids), set(extended.ladders)) == (CASES, {"one", "two"})


@pytest.mark.parametrize("design", ["default", "choose", "merge", "medoid"])
def test_a_policy_over_several_ladders_is_deployed_as_it_is_replayed(home: Path, tmp_path: Path, design: str) -> None:
    policy = calibrated(home, design, tmp_path / "policy.json")
    assert set(policy.ladders) == {"some", "tent"}
    assert policy.options["ladders"] == ["some", "tent"]
    out = tmp_path / "masks"
    done = call(
        "predict", *model(home), "-i", home / "images", "-o", out, "--policy", tmp_path / "policy.json",
        "--set", "save-candidates=true",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    archive, changed = open_archive(home / "both"), 0
    for decision in replay(archive, policy):
        entry = json.loads((out / "casewise" / f"{decision.case_id}.json").read_text())
        assert entry["status"] == "done", entry["error"]
        live = entry["decision"]
        assert (live["action"], live["executed"]) == (decision.action.value, 5)
        assert live["state_hash"] == decision.state_hash
        assert live["state"] == decision.as_dict()["state"]
        assert live["reason"] == decision.reason
        assert "some:" not in decision.reason.replace("some: ", "")  # a view is named, not numbered
        source = archive.ladder("some").mask(decision.case_id, State(0))
        changed += int((saved(out / f"{decision.case_id}.nii.gz") != source).sum())
    assert changed
    page = (out / "report.html").read_text()
    assert page.count("some: 3 candidates, the last one changes") == CASES
    assert page.count("tent: 2 candidates, the last one changes") == CASES
    kept = out / "casewise" / "candidates" / "case_0"
    assert len(list(kept.rglob("*.nii.gz"))) == 1 + 3 + 2


def test_m0_is_predicted_once_for_all_ladders(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from casewise.adapt.model import Model
    from casewise.data.folders import list_cases
    from casewise.deployment.saved import open_deployment

    calibrated(home, "choose", tmp_path / "policy.json")
    plain = Model(FACTORY, weights=home / "unet.safetensors")
    deployment = open_deployment(plain, tmp_path / "policy.json")
    case = deployment.backbone.read(list_cases(home / "images", ending=".nii.gz")[0]).case
    asked: list[Any] = []
    backbone = deployment.backbone
    made = type(backbone).prepare

    def counting(self: Any, one: Any) -> Any:
        ready = made(self, one)
        source = ready.pipeline.source
        return replace(ready, pipeline=replace(ready.pipeline, source=lambda: (asked.append(one), source())[1]))

    monkeypatch.setattr(type(backbone), "prepare", counting)
    found = deployment.predict(case)
    assert (found.status, len(found.ladders), len(asked)) == ("done", 2, 1)


def test_a_policy_of_several_ladders_is_served(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from casewise.data.folders import list_cases
    from casewise.serve import server

    policy = calibrated(home, "merge", tmp_path / "policy.json", "--flag-below", 0.5, "--confidence", 0.5)
    started: list[Any] = []
    monkeypatch.setattr(server, "run", lambda deployment, settings: started.append(deployment))
    done = call("serve", *model(home), "--policy", tmp_path / "policy.json")
    assert done.exit_code == 0, done.output
    (deployment,) = started
    expected = {one.case_id: one for one in replay(open_archive(home / "both"), policy)}
    for files in list_cases(home / "images", ending=".nii.gz")[:2]:
        found = deployment.predict(deployment.backbone.read(files).case)
        assert found.decision.state_hash == expected[files.id].state_hash
        assert found.decision.quality_low == expected[files.id].quality_low is not None
        assert set(found.ladders) == {"some", "tent"}


def decided(out: Path, case_id: str, decision: str, state: str | None) -> None:
    """A decision as the review page posts it, after it has shown the masks of that state."""
    from casewise.serve.review_server import review_server

    with review_server(out, reviewer="Ada", port=0) as server:
        desk = server.desk
        shown = json.loads(desk.read(f"case/{case_id}", {} if state is None else {"state": state}).body)
        assert desk.read(f"masks/{case_id}", {} if state is None else {"state": state}).body[:4] == b"\x89PNG"
        said = {"case": case_id, "decision": decision, "reviewer": "Ada", "about": shown["about"], "note": ""}
        desk.write("decide", json.dumps({**said, "adapted": shown["state"]}).encode())


def test_reviews_of_several_ladders_are_applied(home: Path, tmp_path: Path) -> None:
    """Pieces of the views are deployed and flagged; a person keeps them, a candidate of either ladder, or M0."""
    calibrated(home, "merge", tmp_path / "policy.json", "--flag-below", 0.99, "--confidence", 0.5)
    out, chosen = tmp_path / "masks", tmp_path / "chosen"
    there = ("-i", home / "images", "-o", out, "--policy", tmp_path / "policy.json", "--set", "save-candidates=true")
    done = call("predict", *model(home), *there)
    assert done.exit_code == 0, done.output
    entry = json.loads((out / "casewise" / "case_0.json").read_text())
    assert (entry["decision"]["action"], entry["decision"]["flagged"]) == ("gate", True)
    assert "Please check: case_0, case_1" in done.output  # labelled patients have no estimate
    decided(out, "case_0", "keep-adapted", None)  # shown first: what is deployed
    decided(out, "case_1", "keep-adapted", "tent:2")
    decided(out, "case_2", "keep-adapted", "3")  # the whole edit of the ladder whose pieces are deployed
    decided(out, "case_3", "keep-m0", None)
    with pytest.raises(BadInput, match="adapted states deployed, 1, 2, 3, tent:1, tent:2, got 'tent:3'"):
        decided(out, "case_4", "keep-adapted", "tent:3")
    done = call("review", out, "--apply", "-o", chosen, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["taken"] == {"adapted": 2, "deployed": 3, "m0": 1}
    assert set(said["open"]) == {"case_4", "case_5"}  # flagged and not reviewed
    kept = out / "casewise" / "candidates"
    expected = [
        out / "case_0.nii.gz", kept / "case_1" / "tent" / "2.nii.gz", kept / "case_2" / "3.nii.gz",
        out / "casewise" / "source" / "case_3.nii.gz", out / "case_4.nii.gz", out / "case_5.nii.gz",
    ]  # fmt: skip
    for number, file in enumerate(expected):
        assert (chosen / f"case_{number}.nii.gz").read_bytes() == file.read_bytes()
    log = [json.loads(line) for line in (chosen / "applied.jsonl").read_text().splitlines()]
    assert [line["why"] for line in log if line["event"] == "applied"][:2] == [
        "Ada keeps the written mask",
        "Ada keeps the new mask, state tent:2",
    ]
    assert call("inspect", out).exit_code == 0


def test_what_does_not_belong_to_several_ladders_is_refused(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    calibrated(home, "choose", file)
    with pytest.raises(Mismatch, match="another objective"):
        call("certify", home / "both", "--policy", file, "--ladder", "tent")
    with pytest.raises(BadInput, match=r"one that the policy reads \(some, tent\), got 'other'"):
        call("study", home / "both", "--calibration", home / "both", "--policy", file, "--ladder", "other")
    with pytest.raises(BadInput, match="'frag-stop' reads one ladder step by step, 2 were named"):
        call("calibrate", home / "both", "--policy", "frag-stop", "--ladder", "some", "--ladder", "tent")
    with pytest.raises(BadInput, match="no ladder 'other'; it has 'some', 'tent'"):
        call("calibrate", home / "both", "--policy", "choose", "--ladder", "some", "--ladder", "other")


def test_a_policy_of_several_ladders_is_certified_and_deployed_with_its_certificate(home: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(home / "both", tmp_path / "both"))
    (own / LEDGER).unlink(missing_ok=True)  # other tests compared designs on the shared archive
    calibrated(tmp_path, "medoid", tmp_path / "policy.json")
    done = call("certify", own, "--policy", tmp_path / "policy.json", "--alpha", 0.9, "--out", tmp_path / "c")
    assert done.exit_code == 0, done.output
    certificate = json.loads((tmp_path / "c" / "certificate.json").read_text())
    certified = read_policy(tmp_path / "c" / "policy-certified.json")
    assert set(certified.ladders) == {"some", "tent"}
    assert certificate["binding"] == asdict(certified.binding)
    # The numbers of the certificate, once more: the masks that a replay deploys, measured against the labels.
    archive = open_archive(own)
    expected = [
        harm(
            archive.ladder("some").mask(one.case_id, State(0)),
            archive.mask(one.case_id, one.state),
            archive.ladder("some").label(one.case_id),
            min_area=1,
        ).ha
        for one in replay(archive, read_policy(tmp_path / "policy.json"))
    ]
    assert certificate["deployed"]["before"]["ha"] == pytest.approx(np.mean(expected))
    done = call(
        "predict", *model(home), "-i", home / "images", "-o", tmp_path / "masks", "--policy",
        tmp_path / "c" / "policy-certified.json", "--set", f"certificate={tmp_path / 'c' / 'certificate.json'}",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    live = [json.loads((tmp_path / "masks" / "casewise" / f"{one}.json").read_text()) for one in archive._cases]
    assert [one["decision"]["state_hash"] for one in live] == [one.state_hash for one in replay(archive, certified)]


# ---- one of several ladders, by its name ----


def on_two_ladders(path: Path, plain: Archive, name: str) -> None:
    """The cases of an archive on a ladder of that name, beside another ladder with the candidates in other order."""
    facts = {"steps": plain.steps, "configuration": plain.configuration}
    other = replace(plain.binding, objective="backwards")
    for ladder, binding in (("backwards", other), (name, plain.binding)):
        made = create_archive(path, binding=binding, ladder=ladder, **facts)  # type: ignore[arg-type]
        for case_id in plain.ids:
            entry, one = plain.entry(case_id), plain.trajectory(case_id)
            if ladder != name:
                turned = (one.masks[0], *one.masks[:0:-1])
                one = replace(one, masks=turned, signals=(one.signals[0], *one.signals[:0:-1]))
            case = Case(
                case_id, np.empty((1, 0)), spacing_mm=entry.spacing_mm, group=entry.group, cluster=entry.cluster,
                split=entry.split,
            )  # fmt: skip
            made.add(case, one, plain.label(case_id))
        made.seal()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration and evaluation cases, on an unnamed ladder (``one-``) and on ``tent``, one of two (``two-``)."""
    root = tmp_path_factory.mktemp("worlds")
    for split, count, seed in (("calibration", 12, 1), ("evaluation", 10, 2)):
        plain = synthetic_archive(root / f"one-{split}", cases=count, seed=seed, prefix=split, split=split)
        on_two_ladders(root / f"two-{split}", replace(plain, unlocked_by="a test"), "tent")
    for kind, more in (("one", ()), ("two", ("--ladder", "tent"))):
        done = call("calibrate", root / f"{kind}-calibration", "--policy", "cardiac", *more)
        assert done.exit_code == 0, done.output
    return root


def test_a_named_ladder_is_calibrated_like_an_archive_of_its_own(worlds: Path) -> None:
    one, two = (asdict(read_policy(worlds / f"{kind}-calibration")) for kind in ("one", "two"))
    assert (one.pop("ladder"), two.pop("ladder")) == ("", "tent")
    assert one.pop("calibration_id") != two.pop("calibration_id")
    assert one == two
    with pytest.raises(BadInput, match=r"several ladders \('backwards', 'tent'\); choose one with --ladder NAME"):
        call("calibrate", worlds / "two-calibration", "--policy", "cardiac")


def test_a_named_ladder_is_replayed_like_an_archive_of_its_own(worlds: Path) -> None:
    for controller in (("fixed-k", "--option", "step=3"), ("frag-stop",)):
        one = call("replay", worlds / "one-evaluation", *controller, "--json")
        two = call("replay", worlds / "two-evaluation", *controller, "--json", "--ladder", "tent")
        back = call("replay", worlds / "two-evaluation", *controller, "--json", "--ladder", "backwards")
        found = [json.loads(done.stdout)["decisions"] for done in (one, two, back)]
        for decision in (*found[1], *found[2]):
            decision["state"].pop("ladder", None)
        assert found[0] == found[1] != found[2]


def test_a_named_ladder_is_certified_like_an_archive_of_its_own(worlds: Path, tmp_path: Path) -> None:
    made = []
    for kind, more in (("one", ()), ("two", ("--ladder", "tent"))):
        out = tmp_path / kind
        call("certify", worlds / f"{kind}-calibration", "--alpha", 0.4, "--out", out, *more)
        made.append(json.loads((out / "certificate.json").read_text()))
    same = ("kind", "alpha", "delta", "cut", "statement", "binding", "groups")
    assert [made[0][name] for name in same] == [made[1][name] for name in same]
    assert made[0]["policy"] != made[1]["policy"]


def test_designs_over_several_ladders_are_certified_with_their_choice(worlds: Path, tmp_path: Path) -> None:
    """--policy default: every --ladder counts, for the cases that certify and for the batch that is deployed."""
    archive, both = worlds / "two-calibration", ("--ladder", "tent", "--ladder", "backwards")
    untouched = shutil.copytree(archive, tmp_path / "copy", ignore=shutil.ignore_patterns("exposures.jsonl"))
    asked = ("--policy", "default", "--method", "ltt", "--alpha", 0.9, "--delta", 0.5, "--set", "consensus=tent:1")
    call("certify", archive, *asked, *both, "--out", tmp_path / "ltt")
    certified = read_policy(tmp_path / "ltt" / "policy-certified.json")
    assert set(certified.ladders) == {"tent", "backwards"}
    assert len(certified.options["ladders"]) == 2
    named = ("--set", "consensus=tent:1", "-o", tmp_path / "medoid.json")
    done = call("calibrate", untouched, "--policy", "medoid", *both, *named)
    assert done.exit_code == 0, done.output
    kept = ("--among-kept", worlds / "two-evaluation", "--alpha", 0.9)
    call("certify", untouched, "--policy", tmp_path / "medoid.json", *kept, "--out", tmp_path / "kept")
    found = json.loads((tmp_path / "kept" / "certificate.json").read_text())
    assert found["details"]["batch"] == open_archive(worlds / "two-evaluation").join(("tent", "backwards")).digest


def test_a_named_ladder_is_studied_like_an_archive_of_its_own(worlds: Path, tmp_path: Path) -> None:
    tables = []
    for kind, more in (("one", ()), ("two", ("--ladder", "tent"))):
        out, fast = tmp_path / kind, ("--only", "helphurt", "--set", "pictures=0", "--set", "resamples=100")
        done = call(
            "study", worlds / f"{kind}-evaluation", "-c", worlds / f"{kind}-calibration", "-o", out, *fast, *more
        )
        assert done.exit_code == 0, done.output
        own = ("exposures", "sources", "provenance")  # say when, and which folder
        files = [file for file in (out / "tables").glob("*.csv") if file.stem not in own]
        tables.append({file.name: file.read_text() for file in files})
    assert "helphurt-all.csv" in tables[0]
    assert tables[0] == tables[1]


def test_other_archives_of_a_study_are_read_on_a_ladder_of_their_own(worlds: Path, tmp_path: Path) -> None:
    """--other by its name, the further archives on the ladder that is studied; as archives of one ladder are read."""
    sections = ("rerun", "backbones", "scale", "learning-rates")
    fast = ("--set", "pictures=0", "--set", "resamples=100", *(word for name in sections for word in ("--only", name)))
    tables = []
    for kind in ("one", "two"):
        stream, holdout, out = worlds / f"{kind}-evaluation", worlds / f"{kind}-calibration", tmp_path / kind
        further = (
            "--rerun",
            stream,
            "--backbone",
            f"other={stream}",
            "--other-modality",
            stream,
            "--sweep",
            f"1e-4={stream}",
        )
        done = call("study", stream, "-c", holdout, "-o", out, *further, *fast)
        assert done.exit_code == 0, done.output
        tables.append({file.name: file.read_text() for file in (out / "tables").glob("*.csv")})
    for name in ("alignment.csv", "coherence.csv", "scale-probe.csv", "learning-rates.csv"):
        assert tables[0][name] == tables[1][name], name
    both = f"backwards={worlds / 'two-evaluation'},{worlds / 'two-calibration'}"
    done = call(
        "study", worlds / "two-evaluation", "-c", worlds / "two-calibration", "--other", both, "-o", tmp_path / "other",
        "--only", "deployment", "--set", "pictures=0", "--set", "resamples=100",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = pd.read_csv(tmp_path / "other" / "tables" / "methods.csv")
    own = rows["method"].str.startswith("fixed")
    assert rows.loc[rows["method"].str.startswith("backwards"), "ha"].tolist() != rows.loc[own, "ha"].tolist()
    assert rows["method"].str.startswith("backwards").any()
    with pytest.raises(BadInput, match=r"has no ladder 'memo'; it has 'backwards', 'tent'"):
        call(
            "study", worlds / "two-evaluation", "-c", worlds / "two-calibration", "-o", tmp_path / "none",
            "--other", f"memo={worlds / 'two-evaluation'}",
        )  # fmt: skip


def test_a_policy_of_several_ladders_is_studied_beside_each_of_them(worlds: Path, tmp_path: Path) -> None:
    both = ("--ladder", "tent", "--ladder", "backwards", "--set", "consensus=tent:1", "-o", tmp_path / "policy.json")
    done = call("calibrate", worlds / "two-calibration", "--policy", "medoid", *both)
    assert done.exit_code == 0, done.output
    done = call(
        "study", worlds / "two-evaluation", "-c", worlds / "two-calibration", "--policy", tmp_path / "policy.json",
        "-o", tmp_path / "out", "--set", "pictures=1", "--set", "resamples=100", "--ladder", "backwards",
        "--only", "helphurt",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    written = (tmp_path / "out" / "tables" / "helphurt-all.csv").read_text()
    assert "medoid" in written.lower()
    assert "tent" in written  # the other ladder stands beside the one that was named
    # What the policy deployed, once more: the masks of whichever ladder, measured against the labels.
    archive = replace(open_archive(worlds / "two-evaluation"), unlocked_by="a test")
    policy = read_policy(tmp_path / "policy.json")
    decided = replay(archive, policy)
    assert "tent" in {one.state.ladder for one in decided}  # another ladder than the one in view
    view, calibration = archive.ladder("backwards"), open_archive(worlds / "two-calibration", ladder="backwards")
    rows = Study.of(view, calibration, policy, resamples=100).policy_rows
    expected = [dice(archive.mask(one.case_id, one.state), view.label(one.case_id)) for one in decided]
    assert rows["case"].tolist() == [one.case_id for one in decided]
    assert rows["metric"].to_numpy() == pytest.approx(expected)


def test_masks_of_a_named_ladder_are_controlled_like_an_archive_of_its_own(worlds: Path, tmp_path: Path) -> None:
    for kind, more in (("one", ()), ("two", ("--ladder", "tent"))):
        done = call("qc", worlds / f"{kind}-calibration", "-o", tmp_path / kind, *more)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "one" / "qc.csv").read_text() == (tmp_path / "two" / "qc.csv").read_text()
    views = [name for name in open_archive(worlds / "two-calibration").ladders if name != "tent"]
    every = [word for name in (*views, "tent") for word in ("--ladder", name)]
    assert call("qc", worlds / "two-calibration", "-o", tmp_path / "all", *every).exit_code == 0
    found = {
        kind: pd.read_csv(tmp_path / kind / "qc.csv").set_index("case")["agreement_all"] for kind in ("one", "all")
    }
    assert found["all"].notna().all()
    assert set(found["all"]) != set(found["one"])  # every candidate of both ladders has a vote, M0 one


def test_a_policy_of_one_ladder_is_watched_like_that_of_an_archive_of_its_own(worlds: Path, tmp_path: Path) -> None:
    for kind in ("one", "two"):
        done = call("monitor", "--calibration", worlds / f"{kind}-calibration", "--state", tmp_path / f"{kind}.json")
        assert done.exit_code == 0, done.output
