"""The scripts behind benchmarks/RESULTS.md: recorded, told and left out, on pictures that a program made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in [name for name in sys.modules if name.startswith("real_") or name == "real"]:
        del sys.modules[name]


def changes(clusters, values):
    return pd.DataFrame({"case": range(len(values)), "cluster": clusters, "change": values})


def test_few_clusters_give_their_means_and_no_interval():
    from real_rows import spread

    assert spread(changes(["night", "night", "fog"], [0.1, 0.3, 0.0])) == "(fog +0.0000, night +0.2000)"
    assert spread(changes(list("abcdef"), [0.1] * 6)) == "[+0.1000, +0.1000]"


def test_the_picture_shows_two_sequences_as_rings_and_no_interval():
    from real_across import picture
    from real_rows import interval_of

    def told(clusters, values):
        rows = changes(clusters, values)
        line = {**interval_of(rows), "hurt": 0, "n": len(rows), "forwards": 1.0}
        kept = {"calibration": {"m0": []}}
        return {"source": 0.5, "rows": {"M0": line, "mri: mean of all": line}, "designs": {"mri": kept}}

    few, many = told(["night", "night", "fog"], [0.01, 0.03, 0.0]), told(list("abcdef"), [0.01] * 6)
    drawn = {name: [one.tag.split("}")[1] for one in ElementTree.fromstring(picture({name: found}))
                    if one.get("stroke-width") == ("1.5" if name == "few" else "2")]
             for name, found in (("few", few), ("many", many))}  # fmt: skip
    assert drawn["few"].count("circle") == 4  # two lines of two sequences
    assert drawn["many"] == ["line", "line"]
    assert 'stroke-width="2"' not in picture({"few": few})


def test_the_quota_test_deals_whole_clusters():
    from real_rows import quota_cell

    # step 1 helps patients 0-3 and hurts 4-7; a rule that takes it for exactly those is rarely met by chance
    cases = [f"{k}" for k in range(8)]
    steps = [{"case": name, "step": step, "shrink": 0.0, "ha": 0.0, "metric": 0.5 + step * (0.1 if k < 4 else -0.1)}
             for k, name in enumerate(cases) for step in (0, 1)]  # fmt: skip
    rows = pd.DataFrame({"case": cases, "cluster": cases, "deployed": [1] * 4 + [0] * 4, "shrink": 0.0,
                         "action": "keep", "metric_source": 0.5})  # fmt: skip
    said = quota_cell(pd.DataFrame(steps), rows)
    chance = float(said.split()[1].strip(","))
    assert 0.005 < chance < 0.03  # 1 of 70 deals
    assert said.endswith("HA 1.000")
    assert quota_cell(pd.DataFrame(steps), rows.assign(deployed=1)) == ""  # nothing is ranked


def test_the_rule_needs_a_sure_gain_and_little_harm():
    from real_across import rule_taken

    sure = [[f"patient-{k}", 0.02 + 0.001 * k] for k in range(10)]
    harmful = [[f"patient-{k}", 0.2 if k else -0.5] for k in range(10)]
    kept = {"calibration": {"m0": [], "consensus": sure, "choose": harmful}}
    assert rule_taken(kept, (0.9, 0.05)) == "consensus"  # one of ten hurt is too many for the other
    assert rule_taken(kept, (0.9, 0.1)) == "choose"
    assert rule_taken({"calibration": {"m0": [], "choose": harmful}}, (0.9, 0.05)) == "m0"


def a_folder(folder, cases, first):
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    lines = ["case,group,split,cluster"]
    for number in range(first, first + cases):
        rng = np.random.default_rng(number)
        rows, columns = np.mgrid[:32, :32]
        label = ((rows - rng.integers(12, 20)) ** 2 + (columns - rng.integers(12, 20)) ** 2 < 60).astype(np.uint8)
        picture = 60 + 120 * label[..., None] + rng.integers(0, 60, (32, 32, 3))
        Image.fromarray(picture.astype(np.uint8)).save(folder / "images" / f"c{number}.png")
        Image.fromarray(label).save(folder / "labels" / f"c{number}.png")
        lines.append(f"c{number},made,{folder.name},p{number // 2}")
    (folder / "cases.csv").write_text("\n".join(lines) + "\n")


def taught(network, folder):
    """A network that has seen the pictures a few times, so that it is right in part."""
    names = sorted(file.name for file in (folder / "images").iterdir())
    read = [np.array(Image.open(folder / kind / name)) for kind in ("images", "labels") for name in names]
    inputs = torch.as_tensor(np.stack(read[: len(names)])).permute(0, 3, 1, 2).float()
    labels = torch.as_tensor(np.stack(read[len(names) :])[:, ::4, ::4]).long()
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    return network.eval()


def photographs(folder, names, classes):
    """Round things of one or two labels inside each other, on 64 x 64 pictures."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        rows, columns = np.mgrid[:64, :64]
        distance = (rows - rng.integers(24, 40)) ** 2 + (columns - rng.integers(24, 40)) ** 2
        label = ((distance < 300).astype(np.uint8) + (distance < 80)).clip(max=classes).astype(np.uint8)
        picture = 40 + 70 * label[..., None] + rng.integers(0, 60, (64, 64, 3))
        Image.fromarray(picture.astype(np.uint8)).save(folder / "images" / name)
        Image.fromarray(label).save(folder / "labels" / f"{name.split('.')[0]}.png")


def made_data(data):
    """Polyps and fundus in the layout of the real data: 24 source images, seven cases of each split."""
    for cohort, source, target, ending, classes in (
        ("polyps", "kvasir_seg", "cvc_clinicdb", "jpg", 1),
        ("fundus_disc_cup", "rimone_v3", "drishti_gs", "png", 2),
    ):
        photographs(data / cohort / source, [f"s{k}-L.{ending}" for k in range(24)], classes)
        photographs(data / cohort / target, [f"t{k}.{ending}" for k in range(14)], classes)
        rows = [f"t{k},{target},{('calibration', 'development')[k // 7]},q{k}" for k in range(14)]
        (data / cohort / "cases.csv").write_text("\n".join(["case,domain,split,cluster", *rows]) + "\n")


def make(*asked):
    """``make`` with this interpreter and nothing installed."""
    home = Path(sys.executable).parent
    folders = ":".join(str(ROOT / name) for name in ("src", "tests", "examples"))
    command = ["make", "-o", ".venv/.dev", f"BIN={home}", f"PYTHONPATH={folders}", *asked]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_one_command_goes_from_data_to_the_last_table(tmp_path):
    """``make bench-real`` as a small run on two made cohorts; only the nnU-Net and the driving model are left out."""
    made_data(tmp_path / "data")
    asked = [f"DATA={tmp_path / 'data'}", f"OUT={tmp_path / 'out'}", "SHIFTS=polyps-0 fundus-0", "ARMS=tent"]
    done = make("bench-real", *asked, "CASES=5", "JOBS=2")
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {file.stem: file.read_text() for file in sorted((tmp_path / "out" / "pages").iterdir())}
    assert list(pages) == ["1-shifts", "2-across", "3-throughput", "4-paper", "5-gradients"]
    for page in pages.values():
        assert page.lstrip().startswith("**A small run**: 5 cases of each split")
    for shift in ("polyps-0", "fundus-0"):
        assert f"### {shift}: 5 development cases of 5 clusters, calibrated on 5" in pages["1-shifts"]
        assert f"| {shift} | M0 | 5 |" in pages["3-throughput"]
    assert pages["1-shifts"].index("### polyps-0") < pages["1-shifts"].index("### fundus-0")  # two at a time, in order
    for ladder in ("tent", "eata", "cotta", "consensus"):
        assert pages["1-shifts"].count(f"| {ladder}: fixed-1 |") == 2
    assert "| polyps-0 | level" in pages["2-across"]
    assert "No study of cardiac arms" in pages["4-paper"]
    assert "| fundus, tent | 5 |" in pages["5-gradients"]
    ElementTree.fromstring((tmp_path / "out" / "real-data.svg").read_text())
    whole = make("bench-real", *asked)
    assert whole.returncode != 0  # the small run's folder is not mistaken for the beginning of a whole one
    assert "holds a small run of 5 cases and a whole run is asked for" in whole.stderr


def test_a_small_run_takes_cases_in_turn_from_clusters(tmp_path):
    from real_folders import small_run, start_run, write_folders

    made_data(tmp_path / "data")
    listed = tmp_path / "data" / "polyps" / "cases.csv"
    listed.write_text(listed.read_text().replace("q1\n", "q0\n").replace("q2\n", "q0\n").replace("q8\n", "q7\n"))
    start_run(tmp_path / "out", 5)
    for _ in range(2):  # a run that goes on finds what it left
        home = write_folders("polyps", tmp_path / "data", tmp_path / "out")
    kept = pd.read_csv(home / "calibration" / "cases.csv")
    assert list(kept["case"]) == ["t0", "t3", "t4", "t5", "t6"]  # t1 and t2 are of the same sequence as t0
    assert sorted(file.stem for file in (home / "calibration" / "labels").iterdir()) == ["t0", "t3", "t4", "t5", "t6"]
    assert list(pd.read_csv(home / "development" / "cases.csv")["case"]) == ["t7", "t9", "t10", "t11", "t12"]
    assert small_run(tmp_path / "out") == 5
    start_run(tmp_path / "out", 5)
    with pytest.raises(SystemExit, match="holds a small run of 5 cases and a whole run is asked for: say -o ANOTHER"):
        start_run(tmp_path / "out", None)
    with pytest.raises(SystemExit, match="at least 5 cases of each split, 3 calibrate nothing"):
        start_run(tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # twelve small pictures: tertiles degenerate, and the row says so
def test_from_pictures_to_the_tables(tmp_path, capsys, monkeypatch):
    import real_across
    import real_ladders
    import real_shifts
    from safetensors.torch import save_file

    from benchmarks.source_training import polyps

    out, folders = tmp_path / "out", tmp_path / "out" / "made" / "folders"
    for split, cases, first in (("calibration", 12, 0), ("development", 12, 100)):
        a_folder(folders / split, cases, first)
    weights = tmp_path / "made.safetensors"
    save_file(taught(polyps().network, folders / "calibration").state_dict(), weights)
    monkeypatch.setattr(real_ladders, "write_folders", lambda cohort, data, out: out / cohort / "folders")
    ladders = {"photo": real_ladders.views("photo"), **real_ladders.gradients({"tent": 5e-3})}
    model = real_ladders.Model("benchmarks.source_training:polyps", weights)
    shifts = {name: real_ladders.Shift(name, "made", model, ladders) for name in ("made-0",)}
    for shift in shifts.values():
        real_ladders.record(shift, tmp_path, out, None)
        real_ladders.record(shift, tmp_path, out, None)  # whole: nothing is recorded twice
        real_shifts.tell(shift, out)
    printed = capsys.readouterr().out
    assert printed.count("made-0 development tent") == 12
    for row in ("M0", "photo: mirror(x) alone", "photo: set `photo`, sequential", "photo: merge, cross-fitted",
                "tent: frag-stop", "consensus: fixed-5", "photo, consensus | ha <= 0.2",
                "photo, default, chosen with it | ha <= 0.2 with chance 0.9"):  # fmt: skip
        assert f"| {row} |" in printed, row
    for heading in real_shifts.BLOCKS:
        assert f"\n{heading}:\n\n| method |" in printed
    assert "photo: `--policy default`, which takes" in printed
    assert "photo: `flag`: the same," in printed or "photo: default with flags below 0.7:" in printed
    assert "tent: router of the paper" in printed  # a row, or why there is none: twelve pictures tie easily
    told = {name: json.loads((out / "tables" / f"{name}.json").read_text()) for name in shifts}
    told["made-1"], cohorts = told["made-0"], {"made-0": "one", "made-1": "another"}
    for table in (real_across.rules, real_across.designs, real_across.settling):
        assert list(table(told, cohorts))
    ElementTree.fromstring(real_across.picture(told))
    whole = told["made-0"]["rows"]["photo: mean of all"]
    assert whole["gain"] == pytest.approx(np.mean(list(whole["changes"].values())), abs=1e-4)


def test_a_training_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    from benchmarks import source_training

    made_data(tmp_path / "data")
    few = {"data": tmp_path / "data", "epochs": 3, "most": 16}
    whole = source_training.train("polyps", 0, out=tmp_path / "whole", **few)
    save = source_training._save

    def stop(state, path):
        save(state, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(source_training, "_save", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            source_training.train("polyps", 0, out=tmp_path / "parts", **few)
    monkeypatch.setattr(source_training, "_save", save)
    parts = source_training.train("polyps", 0, out=tmp_path / "parts", **few)
    assert len(parts.validation_curve) == 3
    assert parts.validation_curve == pytest.approx(whole.validation_curve, abs=1e-3)
    one, other = (load_file(tmp_path / name / "polyps-0.safetensors") for name in ("whole", "parts"))
    assert all(np.allclose(one[key], other[key], atol=1e-4) for key in one)
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["polyps-0.json", "polyps-0.safetensors"]


def test_an_arm_that_is_a_ladder_of_the_views_half_is_not_recorded_again(tmp_path):
    import real
    import real_ladders

    from casewise.core.records import State

    ladders = real_ladders.shifts(tmp_path, tmp_path)
    taken = {(shift.name, arm.name): arm.ladder for shift in real.shifts(tmp_path, tmp_path).values()
             for arm in shift.arms if arm.ladder is not None}  # fmt: skip
    assert set(taken) == {("cardiac", "tent"), ("cardiac", "cotta"), ("fundus", "tent"), ("fundus", "eata"),
                          ("driving", "tent-mild")}  # fmt: skip
    for (cohort, arm), (shift, ladder) in taken.items():
        how = ladders[shift].ladders[ladder]
        assert ladders[shift].cohort == cohort
        assert how.objective == arm.split("-")[0]
        assert (how.learning_rate, how.steps) == (1e-4 if cohort == "driving" else 5e-4, 4)
        assert how.shrink == (State(2, 0.5),)
        where = real.shifts(tmp_path, tmp_path)[cohort]
        chosen = next(one for one in where.arms if one.name == arm)
        assert where.archive(chosen, tmp_path, "calibration") == ladders[shift].archive(tmp_path, "calibration")


def test_tables_of_a_few_sequences_print_no_interval():
    from real_tables import Study, interval

    findings = {
        "deployment.intervals": {"rows": [{"id": "router~m0:metric", "estimate": 0.01, "low": 0.0, "high": 0.02}]}
    }
    said = {kind: interval(Study("driving", "tent", "default", {"findings": findings, "warnings": warnings})
                           .row("deployment.intervals", id="router~m0:metric"))
            for kind, warnings in (("few", ["FEW: 2 patients or sequences"]), ("many", ["NO-GO: ..."]))}  # fmt: skip
    assert said == {"few": "+0.0100 [undefined]", "many": "+0.0100 [+0.0000, +0.0200]"}
