"""The scripts behind benchmarks/RESULTS.md: recorded, told and left out, on pictures that a program made."""

from __future__ import annotations

import json
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
    for name in ("real_across", "real_shifts", "real_ladders", "real_folders"):
        sys.modules.pop(name, None)


def changes(clusters, values):
    return pd.DataFrame({"case": range(len(values)), "cluster": clusters, "change": values})


def test_few_clusters_give_their_means_and_no_interval():
    from real_shifts import spread

    assert spread(changes(["night", "night", "fog"], [0.1, 0.3, 0.0])) == "(fog +0.0000, night +0.2000)"
    assert spread(changes(list("abcdef"), [0.1] * 6)) == "[+0.1000, +0.1000]"


def test_the_picture_shows_two_sequences_as_rings_and_no_interval():
    from real_across import picture
    from real_shifts import interval_of

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
    from real_shifts import quota_p

    # step 1 helps patients 0-3 and hurts 4-7; a rule that takes it for exactly those is rarely met by chance
    cases = [f"{k}" for k in range(8)]
    steps = [{"case": name, "step": step, "shrink": 0.0, "ha": 0.0, "metric": 0.5 + step * (0.1 if k < 4 else -0.1)}
             for k, name in enumerate(cases) for step in (0, 1)]  # fmt: skip
    rows = pd.DataFrame({"case": cases, "cluster": cases, "deployed": [1] * 4 + [0] * 4, "shrink": 0.0,
                         "action": "keep", "metric_source": 0.5})  # fmt: skip
    said = quota_p(pd.DataFrame(steps), rows)
    chance = float(said.split()[1].strip(","))
    assert 0.005 < chance < 0.03  # 1 of 70 deals
    assert said.endswith("HA 1.000")
    assert quota_p(pd.DataFrame(steps), rows.assign(deployed=1)) == ""  # nothing is ranked


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
    monkeypatch.setattr(real_ladders, "WRITERS", {"made": lambda data, out: None})
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
