"""``casewise bench``: what it measures, that labels come last, that edits are found, and what a leaderboard refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from worlds.datasets import write_data

from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.archive.store import open_archive
from casewise.cli import app
from casewise.core.chain import BEGINNING, line_hash
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, Mismatch, Refused
from casewise.core.records import State
from casewise.judge.ledger import read_ledger
from casewise.study.benchmark.case_scores import OPENED, label_source
from casewise.study.benchmark.check import SEALED_FIELDS, check, file_problems
from casewise.study.benchmark.decisions import SEALED
from casewise.study.benchmark.leaderboard import cells, leaderboard, markdown
from casewise.study.benchmark.method_scores import quota_p, summary
from casewise.study.benchmark.result import data_sha256, kept_frame
from casewise.study.benchmark.sides import sides_of
from casewise.study.statistics.resample import clusters_of

FACTORY = "casewise.adapt.networks:PlainUNet"
pytestmark = pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")


def call(*arguments: object) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a network, and a finished benchmark with views and one update of TENT."""
    from casewise.adapt.networks import PlainUNet

    folder = tmp_path_factory.mktemp("bench")
    torch.manual_seed(3)
    write_safetensors(folder / "unet.safetensors", PlainUNet().state_dict())
    write_data(folder / "data", 14)
    outcome = run(folder, folder / "out", "--propose", "tent")
    assert outcome.exit_code == 0, outcome.output
    return folder


def run(home: Path, out: Path, *more: object, data: Path | None = None) -> Any:
    model = ("-m", FACTORY, "--weights", home / "unet.safetensors", "-device", "cpu", "--min-area", 1)
    views = ("--propose", "two=views:mirror(x),gamma(1.4)")
    updates = ("--steps", 2, "--lr", 1e-2) if "tent" in more else ()
    return call(data or home / "data", *model, *views, *updates, "-o", out, "--alpha", 0.4, *more)


def result_of(home: Path) -> dict[str, Any]:
    return json.loads((home / "out" / "result.json").read_text())


def test_every_method_is_measured_and_the_file_says_on_what(home: Path) -> None:
    result = result_of(home)
    names = [method["name"] for method in result["methods"]]
    assert names[:3] == ["M0", "two: mean for everyone", "two: default"]
    assert {"tent: step 2 for everyone", "tent: default"} <= set(names)
    assert [len(result["data"][side]) for side in ("calibration", "evaluation")] == [7, 7]
    assert result["methods"][0]["scores"]["gain"] == 0
    assert result["methods"][0]["scores"]["forwards"] == 1
    consensus = result["methods"][1]["scores"]
    assert consensus["forwards"] == 3
    assert consensus["updates"] == 0
    tent = next(method for method in result["methods"] if method["name"] == "tent: step 2 for everyone")["scores"]
    assert tent["forwards"] is None
    assert tent["updates"] == 2
    assert tent["seconds"] > 0
    assert "case-p0" not in json.dumps(result)  # patients by hash only


def named(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(method for method in result["methods"] if method["name"] == name)


def test_a_policy_over_both_ladders_pays_for_both(home: Path) -> None:
    result = result_of(home)
    both = named(result, "two + tent: default")
    assert both["ladders"] == ["two", "tent"]
    assert both["certificate"] is None  # its certified twin, if seven cases allow one, has a row of its own
    assert both["scores"]["updates"] == 2  # of TENT; the views were read too, so forwards alone say little
    assert both["scores"]["forwards"] is None
    rows = {row["case"]: row["metric"] for row in both["rows"]}
    best = {case["case"]: case["best"] for case in result["data"]["evaluation"]}
    chosen = [one for one in both["decisions"] if one["action"] != "gate"]
    assert all(rows[one["case_id"]] <= best[one["case_id"]] + 1e-9 for one in chosen)


def test_designs_that_labels_fit_are_certified_on_the_other_half(home: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "data", 36)
    more = ("--propose", "tent", "--policy", "merge", "--alpha", 0.9, "--loss", "worse-voxels", "--delta", 0.3)
    outcome = run(home, tmp_path / "out", *more, "-q", data=tmp_path / "data")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    promised = named(result, "two: merge, certified")["certificate"]
    assert (promised["units"], promised["delta"], promised["alpha"]) == (9, 0.3, 0.9)  # half of 18 patients
    assert "! two: merge, certified: labels fit this design, so half of the calibration" in outcome.output
    both = named(result, "two + tent: merge, certified")  # a policy that reads both ladders is certified as they are
    assert both["ladders"] == ["two", "tent"]
    assert both["certificate"]["units"] == 9
    assert both["realised"] <= 0.9
    assert "! two + tent: merge, certified: labels fit this design" in outcome.output
    whole = call("--check", tmp_path / "out" / "result.json", tmp_path / "data", "--json")
    assert json.loads(whole.output)["problems"] == []


def test_agreement_orders_the_cases_and_chance_deals_the_states(home: Path, tmp_path: Path) -> None:
    """AURC, AUROC and the p of a rule that ranks, a second time from the rows of the file."""
    shutil.copytree(home / "out", tmp_path / "out")
    outcome = run(home, tmp_path / "out", "--propose", "tent", "--policy", "frag-stop", "--policy", "medoid", "-q")
    assert outcome.exit_code == 0, outcome.output
    assert "AURC (best)" in outcome.output
    assert "p at its quota: gain, HA" in outcome.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    method = named(result, "two: mean for everyone")
    rows = sorted(method["rows"], key=lambda row: -row["agreement"])
    risks = [1 - row["metric"] for row in rows]
    means = [np.mean(risks[: k + 1]) for k in range(len(risks))]
    if len({row["agreement"] for row in rows}) == len(rows):  # no ties
        assert method["scores"]["aurc"] == pytest.approx(np.mean(means), abs=0.05)
    poor = [row for row in rows if row["metric"] < 0.7]
    good = [row for row in rows if row["metric"] >= 0.7]
    if poor and good:
        pairs = [
            (a["agreement"] < b["agreement"]) + 0.5 * (a["agreement"] == b["agreement"]) for a in poor for b in good
        ]
        assert method["scores"]["auroc"] == pytest.approx(np.mean(pairs))
    ranked = [one for one in result["methods"] if one["dealt"] is not None]
    assert ranked
    for one in ranked:
        place, changes = one["dealt"]["given"], np.array(one["dealt"]["change"])
        assert changes[np.arange(len(place)), place].mean() == pytest.approx(one["scores"]["gain"])
        shuffled = np.random.default_rng(5)
        drawn = [changes[np.arange(len(place)), shuffled.permutation(place)].mean() for _ in range(2000)]
        expected = np.mean(np.array(drawn) >= one["scores"]["gain"] - 1e-12)
        assert one["scores"]["p_gain"] == pytest.approx(expected, abs=0.06)
    assert file_problems(result) == []
    forged = json.loads(json.dumps(result))
    one = named(forged, ranked[0]["name"])
    one["scores"]["p_gain"] = 0.001 if one["scores"]["p_gain"] > 0.1 else 0.9
    assert any("p_gain is" in problem for problem in file_problems(forged))
    other = next(k for k in range(len(one["dealt"]["states"])) if k != one["dealt"]["given"][0])
    forged = json.loads(json.dumps(result))
    named(forged, ranked[0]["name"])["dealt"]["change"][0][other] -= 0.25  # of a state that was not deployed
    forged = rehashed(forged)
    assert file_problems(forged) == []
    problems, _ = check(forged, tmp_path / "out", [home / "data"])
    assert any("of the states that could be dealt is another one" in problem for problem in problems)


def test_a_gain_is_what_masks_and_labels_say(home: Path) -> None:
    """The mean gain of the consensus a second time, from the files."""
    method = result_of(home)["methods"][1]
    archive = open_archive(home / "out" / "evaluation", ladder="two")
    gains = []
    for case_id in archive.ids:
        label = np.asarray(nibabel.load(home / "data" / "labels" / f"{case_id}.nii.gz").dataobj).T > 0
        both = [archive.mask(case_id, state) == 1 for state in (State(3), State(0))]
        new, old = (2 * (mask & label).sum() / (mask.sum() + label.sum()) for mask in both)
        gains.append(new - old)
    assert method["scores"]["gain"] == pytest.approx(np.mean(gains), abs=1e-9)
    assert method["scores"]["helped"] == sum(gain > 0 for gain in gains)
    assert method["scores"]["hurt_by_a_point"] == sum(gain < -0.01 for gain in gains)


def test_labels_are_opened_once_and_after_the_decisions(home: Path) -> None:
    result, archive = result_of(home), open_archive(home / "out" / "evaluation", ladder="two")
    assert not any(entry.labelled for entry in archive.entries.values())
    assert not list((home / "out").rglob("evaluation/**/label.npz"))
    choices = [line["choice"] for line in read_ledger(archive.path)]
    assert choices == [f"{SEALED} {result['decisions_sha256']}", f"{OPENED} {result['decisions_sha256']}"]
    assert result["labels_seen_before_decisions"] is False


def test_the_same_command_again_goes_on_and_opens_nothing_twice(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "evaluation" / "cases" / "case_13" / "ladder-tent")
    manifest = json.loads((tmp_path / "out" / "evaluation" / "manifest.json").read_text())
    manifest.pop("cases")  # as before sealing: killed in the middle
    (tmp_path / "out" / "evaluation" / "manifest.json").write_text(json.dumps(manifest))
    assert run(home, tmp_path / "out", "--propose", "tent").exit_code == 0
    again = json.loads((tmp_path / "out" / "result.json").read_text())
    assert again["decisions_sha256"] == result_of(home)["decisions_sha256"]
    assert len(read_ledger(tmp_path / "out" / "evaluation")) == 2


def test_a_check_repeats_everything_and_says_what_it_could_not(home: Path, tmp_path: Path) -> None:
    whole = call("--check", home / "out" / "result.json", home / "data", "--json")
    assert whole.exit_code == 0
    assert json.loads(whole.output)["not_checked"] == []
    shutil.copy(home / "out" / "result.json", tmp_path)
    alone = call("--check", tmp_path / "result.json")
    assert alone.exit_code == 0
    assert "no decision was taken again" in alone.output
    assert "no data were given" in alone.output


# ---- attacks ----


def rehashed(result: dict[str, Any]) -> dict[str, Any]:
    """As a careful forger would: sums, hashes and ledger made to fit again."""
    sealed = [{name: method[name] for name in SEALED_FIELDS} for method in result["methods"]]
    old, new = result["decisions_sha256"], json_sha256(sealed)
    previous = BEGINNING
    for line in result["ledger"]:
        line["choice"] = line["choice"].replace(old, new)
        line["previous"] = previous
        previous = line["hash"] = line_hash(line)
    result["decisions_sha256"] = new
    result["data"]["sha256"] = data_sha256(result["data"]["evaluation"])
    for method in result["methods"]:
        rows = kept_frame(method["rows"], result["data"]["evaluation"])
        dealt = method["dealt"] = forged_deal(method)
        method["scores"] = {**summary(rows, result["oracle"]), **quota_p(dealt, clusters_of(rows))}
    rest = {name: value for name, value in result.items() if name != "sha256"}
    return {**rest, "sha256": json_sha256(json.loads(json.dumps(rest)))}


def forged_deal(method: dict[str, Any]) -> dict[str, Any] | None:
    """What a random deal would be drawn from, made to fit decisions and rows; other states as they were or invented."""
    given = [str(State(**one["state"])) for one in method["decisions"]]
    states = sorted(set(given))
    if len(states) < 2 or any(one["action"] == "gate" for one in method["decisions"]):
        return None
    dealt = method["dealt"] or {
        name: [[row[name]] * len(states) for row in method["rows"]] for name in ("change", "ha")
    }  # fmt: skip
    dealt |= {"states": states, "given": [states.index(one) for one in given]}
    for name in ("change", "ha"):
        for values, place, row in zip(dealt[name], dealt["given"], method["rows"], strict=True):
            values[place] = row[name]
    return dealt


def edit_gain(result: dict[str, Any]) -> None:
    result["methods"][2]["scores"]["gain"] += 0.01


def edit_row(result: dict[str, Any]) -> None:
    row = result["methods"][1]["rows"][0]
    row["metric"] -= 0.01
    row["change"] -= 0.01


def edit_source(result: dict[str, Any]) -> None:
    result["data"]["evaluation"][0]["metric"] -= 0.1


def edit_flag(result: dict[str, Any]) -> None:
    result["methods"][1]["rows"][0]["flagged"] = True


def edit_order(result: dict[str, Any]) -> None:
    result["ledger"].reverse()


def edit_ledger(result: dict[str, Any]) -> None:
    result["ledger"][0]["time"] = "2020-01-01T00:00:00+00:00"


def edit_seen(result: dict[str, Any]) -> None:
    result["labels_seen_before_decisions"] = True


def swap_decision(result: dict[str, Any]) -> None:
    one, two = result["methods"][1], result["methods"][0]
    one["decisions"][0], one["rows"][0] = two["decisions"][0], two["rows"][0]


def drop_case(result: dict[str, Any]) -> None:
    result["methods"][1]["rows"].pop()


def share_patient(result: dict[str, Any]) -> None:
    result["data"]["evaluation"][0]["cluster"] = result["data"]["calibration"][0]["cluster"]


def lose_part(result: dict[str, Any]) -> None:
    del result["methods"][0]["decisions"]


CLUMSY: list[Callable[[dict[str, Any]], None]] = [
    edit_gain, edit_row, edit_source, edit_flag, edit_order, edit_ledger, edit_seen, swap_decision, drop_case,
    share_patient, lose_part,
]  # fmt: skip


@pytest.mark.parametrize("attack", CLUMSY, ids=lambda attack: attack.__name__)
def test_an_edit_is_found_in_the_file_alone(home: Path, tmp_path: Path, attack: Callable[[Any], None]) -> None:
    result = result_of(home)
    attack(result)
    (tmp_path / "result.json").write_text(json.dumps(result))
    outcome = call("--check", tmp_path / "result.json")
    assert outcome.exit_code == 1
    assert "! " in outcome.output


@pytest.mark.parametrize(
    "attack", [edit_source, edit_flag, edit_seen, share_patient], ids=lambda attack: attack.__name__
)
def test_some_edits_show_even_where_all_hashes_were_made_to_fit(home: Path, attack: Callable[[Any], None]) -> None:
    result = result_of(home)
    attack(result)
    assert file_problems(rehashed(result))


def test_a_forged_decision_is_found_by_deciding_again(home: Path) -> None:
    result = result_of(home)
    chooses = result["methods"][1]
    swap_decision(result)
    forged = rehashed(result)
    assert file_problems(forged) == []  # the file alone cannot tell
    problems, _ = check(forged, home / "out")
    assert problems == [f"{chooses['name']}: decided again, 1 cases differ, such as case_07"]


def test_forged_numbers_are_found_by_scoring_again(home: Path) -> None:
    result = result_of(home)
    shown = {one["state_hash"] for method in result["methods"][:1] for one in method["decisions"]}
    place = next(
        place
        for place, one in enumerate(result["methods"][1]["decisions"])
        if one["state_hash"] not in shown
    )  # fmt: skip
    mask = result["methods"][1]["decisions"][place]["state_hash"]
    for method in result["methods"]:  # consistently, wherever the mask was deployed
        for one, row in zip(method["decisions"], method["rows"], strict=True):
            if one["state_hash"] == mask:
                row["metric"] -= 0.001
                row["change"] = row["metric"] - result["data"]["evaluation"][place]["metric"]
    forged = rehashed(result)
    assert file_problems(forged) == []
    assert check(forged, home / "out")[0] == []  # masks and decisions are right
    problems, _ = check(forged, home / "out", [home / "data"])
    assert any("metric is" in problem and "recomputed" in problem for problem in problems)


def test_other_images_other_labels_and_other_masks_are_found(home: Path, tmp_path: Path) -> None:
    result = result_of(home)
    other = write_data(tmp_path / "other", 14, prefix="case", split=False)
    for kind, wrong in (("images", "the image is another one"), ("labels", "the label is another one")):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        shutil.copytree(home / "data", tmp_path / "data")
        file = "case_09_0000.nii.gz" if kind == "images" else "case_09.nii.gz"
        changed = nibabel.load(other / kind / file)
        voxels = np.asarray(changed.dataobj)[::-1].copy()
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "data" / kind / file)
        problems, _ = check(result, home / "out", [tmp_path / "data"])
        assert f"evaluation case case_09: {wrong}" in problems
    shutil.copytree(home / "out", tmp_path / "out")
    mask = tmp_path / "out" / "evaluation" / "cases" / "case_09" / "masks.npz"
    mask.write_bytes(mask.read_bytes()[:-1])
    assert any("case_09" in problem for problem in check(result, tmp_path / "out")[0])


def test_an_edited_table_beside_the_archive_fools_no_check(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "out", tmp_path / "out")
    for file in (tmp_path / "out").rglob("cache/*"):
        file.write_bytes(b"forged")
    assert check(result_of(home), tmp_path / "out", [home / "data"])[0] == []


# ---- the wall, and the leaderboard ----


def test_what_was_decided_after_the_labels_is_marked_and_never_ranked(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "out", tmp_path / "out")
    later = run(home, tmp_path / "out", "--policy", "frag-stop", "--quiet")
    assert later.exit_code == 0
    assert "labels had been opened in this folder before" in later.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["labels_seen_before_decisions"] is True
    assert file_problems(result) == []
    with pytest.raises(Refused, match="evaluation labels were seen before its decisions were sealed"):
        leaderboard({"later.json": result})


def test_a_leaderboard_ranks_results_of_the_same_data(home: Path, tmp_path: Path) -> None:
    first = result_of(home)
    second = rehashed({**result_of(home), "name": "<script>alert(1)</script> | x"})
    for name, one in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps(one))
    made = leaderboard({"a.json": first, "b.json": second})
    gains = [float(str(row["gain"]).split()[0]) for row in made.rows]
    assert len(gains) == 2 * len(first["methods"])
    assert gains == sorted(gains, reverse=True)
    assert "<script>" not in markdown(made)
    for ending in ("md", "html", "json"):
        outcome = call("--leaderboard", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / f"board.{ending}")
        assert (
            outcome.exit_code == 0 and "<script>" not in (tmp_path / "board.html").read_text()
            if ending == "html"
            else 1
        )
    rows = json.loads((tmp_path / "board.json").read_text())["rows"]
    assert {"file", "model", "method", "gain", "hurt", "realised"} <= set(rows[0])


def test_a_leaderboard_takes_a_result_once(home: Path, tmp_path: Path) -> None:
    copy = shutil.copy(home / "out" / "result.json", tmp_path / "copy.json")
    with pytest.raises(Refused, match=r"copy.json is the same result as .*result.json"):
        call("--leaderboard", home / "out" / "result.json", copy)


def test_tables_say_no_go_where_a_promise_would_stand(home: Path) -> None:
    result = result_of(home)
    certified = next(method for method in result["methods"] if method["name"] == "two: default")
    certified["notes"] = [
        "NO-GO: of the calibration cases that policy 'x' keeps adapted, 1 were helped and 6 were hurt"
    ]
    certified["certificate"] = {"loss": "ha", "alpha": 0.4}
    certified["realised"] = 0.0
    assert cells(certified)["promise"] == "NO-GO"
    certified["notes"] = []
    assert cells(certified)["promise"] == "ha ≤ 0.4, 0.000"


def test_a_leaderboard_does_not_replace_a_result(home: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(home / "out" / "result.json", tmp_path))
    before = file.read_bytes()
    with pytest.raises(BadInput, match="is one of the results"):
        call("--leaderboard", file, "-o", file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("ending", ["md", "html", "json"])
def test_a_leaderboard_replaces_a_leaderboard_and_no_other_file(ending: str, home: Path, tmp_path: Path) -> None:
    file, out = home / "out" / "result.json", tmp_path / f"board.{ending}"
    for _ in range(2):
        assert call("--leaderboard", file, "-o", out).exit_code == 0
    for foreign in (b"# My notes", b"<html><p>mine</p></html>", b'{"mine": 1}', b"\xff\xfe", b"[" * 100_000):
        out.write_bytes(foreign)
        with pytest.raises(BadInput, match="is there and holds no leaderboard; give -o another name"):
            call("--leaderboard", file, "-o", out)
        assert out.read_bytes() == foreign


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"schema": ' * 50_000, b"1" * 6000, b"\x00", b"", b'{"a": 1'])
def test_what_is_no_result_file_is_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.json is not a result file of casewise bench"):
        call("--check", tmp_path / "a.json")


def test_a_result_that_is_nested_without_end_is_no_traceback(home: Path) -> None:
    result = result_of(home)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    result["methods"][0]["notes"] = deep
    (problem,) = file_problems(result)
    assert problem.startswith("the file was edited: a part is missing or is not what it should be (RecursionError")


def test_a_leaderboard_refuses_other_data_and_edited_files(home: Path) -> None:
    first, other, edited = result_of(home), result_of(home), result_of(home)
    other["data"]["evaluation"][0]["label_sha256"] = "0" * 64
    with pytest.raises(Mismatch, match=r"b.json was measured on other evaluation data .* than a.json"):
        leaderboard({"a.json": first, "b.json": rehashed(other)})
    edit_gain(edited)
    with pytest.raises(Refused, match=r"b\.json contradicts itself"):
        leaderboard({"a.json": first, "b.json": edited})


# ---- options arrive ----


def test_every_option_arrives(home: Path, tmp_path: Path) -> None:
    """One run in which each option differs from its default, and what the file says of it."""
    write_data(tmp_path / "evaluates", 5, prefix="new", split=False)
    write_data(tmp_path / "calibrates", 6, prefix="old", split=False)
    options = ("--calibration", tmp_path / "calibrates", "--policy", "fixed-k", "--policy", "cardiac", "--name", "mine")
    more = ("--propose", "tent", "--steps", 4, "--shrink", "2:0.5", "--metric", "miou", "--seed", 5)
    promised = ("--loss", "harmed", "--alpha", 0.6, "--margin", 0.02)
    outcome = run(home, tmp_path / "out", *options, *more, *promised, "--json", "-q", data=tmp_path / "evaluates")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert json.loads(outcome.stdout)["sha256"] == result["sha256"]
    assert result["name"] == "mine"
    assert result["metric"] == "miou"
    assert {case["case"][:3] for case in result["data"]["calibration"]} == {"old"}
    assert {case["case"][:3] for case in result["data"]["evaluation"]} == {"new"}
    assert set(result["archives"]) == {"two", "tent"}
    assert result["archives"]["tent"]["steps"] == 4
    designs = {method["design"] for method in result["methods"]} - {""}
    assert designs <= {"fixed-k", "cardiac"}
    assert "fixed-k" in designs
    assert result["promise"]["losses"] == ["harmed"]
    assert result["promise"]["margin"] == 0.02
    assert result["promise"]["alphas"] == [0.6]
    archive = open_archive(tmp_path / "out" / "evaluation", ladder="tent")
    assert State(2, 0.5) in archive.states
    assert archive.configuration["seed"] == 5
    check_again = call("--check", tmp_path / "out" / "result.json", tmp_path / "evaluates", tmp_path / "calibrates")
    assert check_again.exit_code == 0, check_again.output


def test_merged_classes_renumber_the_label(home: Path) -> None:
    archive = open_archive(home / "out" / "evaluation", ladder="two")
    cohort = sides_of(home / "data").evaluation
    plain, merged = (label_source(cohort, archive, table)("case_09") for table in (None, [0, 5]))
    assert set(np.unique(plain)) == {0, 1}
    np.testing.assert_array_equal(merged, plain * 5)


def test_wrong_questions_are_answered_in_one_sentence(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"needs one folder of data, a model and a place: .* \(got 0 folders, no -o\)"):
        call()
    with pytest.raises(BadInput, match="are two questions"):
        call("--check", "a.json", "--leaderboard")
    with pytest.raises(BadInput, match=r"no result file .*nothing\.json"):
        call("--check", tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BadInput, match="its schema is None, expected 'casewise-bench/2'"):
        call("--check", tmp_path / "other.json")
    with pytest.raises(BadInput, match="at least one result file"):
        call("--leaderboard")
    with pytest.raises(BadInput, match=r"written as .md, .html or .json, got board.pdf"):
        call("--leaderboard", home / "out" / "result.json", "-o", tmp_path / "board.pdf")
    with pytest.raises(BadInput, match="no policy is called 'defalt'"):
        run(home, tmp_path / "new", "--policy", "defalt")
    with pytest.raises(BadInput, match="bench takes no --preset; give what driving stands for: --metric miou"):
        run(home, tmp_path / "new", "--preset", "driving")
    with pytest.raises(Mismatch, match="holds a benchmark with other metric"):
        run(home, home / "out", "--metric", "miou")


@pytest.mark.parametrize("mine", ["data/calibration/scan.nii.gz", "result.json", "evaluation/notes.txt"])
def test_a_folder_that_no_benchmark_wrote_is_left_alone(home: Path, tmp_path: Path, mine: str) -> None:
    (tmp_path / mine).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mine).write_text("mine")
    with pytest.raises(BadInput, match=f"holds {mine.partition('/')[0]}, which no casewise bench wrote"):
        run(home, tmp_path)
    assert (tmp_path / mine).read_text() == "mine"


def test_a_plan_of_somebody_else_is_left_alone(home: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1, 2")
    with pytest.raises(BadInput, match=r"plan\.json is no plan of casewise bench"):
        run(home, tmp_path)
