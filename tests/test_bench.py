"""``casewise.bench``: methods of every kind in a few lines of Python."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import casewise
from casewise.adapt.backbones.module import Module
from casewise.adapt.networks import PlainUNet
from casewise.adapt.snapshot import fingerprint
from casewise.archive.store import open_archive
from casewise.core.errors import BadInput
from casewise.core.records import State

pytestmark = pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")
TWO_STEPS = casewise.Adaptation(steps=2, min_area=1)
VIEWS = "two=views:mirror(x),gamma(1.4)"


def cases(count: int = 20) -> tuple[list[Any], list[Any], list[str]]:
    """Discs with noise, two pictures of each patient."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:24, :24]
    labels = [((y - 10) ** 2 + (x - 9 - at % 3) ** 2 < 30).astype(np.uint8) for at in range(count)]
    images = [(label + 0.3 * rng.standard_normal(label.shape)).astype(np.float32)[None] for label in labels]
    return images, labels, [f"p{at // 2}" for at in range(count)]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(3)
    return PlainUNet()


def brighter(network: nn.Module, image: Tensor) -> list[Tensor]:
    """A method of one's own: it moves a weight, which must come back, and returns two masks."""
    with torch.no_grad():
        next(network.parameters()).add_(0.1)
        return [network(image * scale).argmax(1) for scale in (1.2, 1.5)]


@pytest.fixture(scope="module")
def found(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Any:
    before = fingerprint(network)
    images, labels, patients = cases()
    made = casewise.bench(
        network, images, labels, methods=[brighter, "tent", VIEWS], policies=["default", "frag-stop"],
        patients=patients, share=0.5, alpha=0.5, adaptation=TWO_STEPS, out=tmp_path_factory.mktemp("bench") / "out",
    )  # fmt: skip
    assert fingerprint(network) == before
    return made


def test_m0_cannot_be_hurt_by_itself_so_its_bound_is_a_dash(found: Any) -> None:
    heads, m0, other = (list(csv.reader(found.csv().splitlines()))[at] for at in (0, 1, 2))
    column = heads.index("hurt_bound")
    assert m0[0] == "M0"
    assert not any(char.isdigit() for char in m0[column])
    assert float(other[column]) > 0


def test_the_table_has_every_method(found: Any) -> None:
    assert isinstance(found.table, pd.DataFrame)
    names = set(found.table["method"])
    assert {"M0", "brighter: step 2 for everyone", "tent: frag-stop", "two: mean for everyone"} <= names
    assert "all 3 methods: default" in names, "the joint row has a short name"
    rows = found.table.set_index("method")
    assert rows.loc["M0", "gain"] == 0
    assert rows.loc["brighter: step 2 for everyone", "cases"] == 10
    assert set(found.cases["case"]) == set(found.result["evaluation"])


def test_a_function_is_measured_by_its_own_masks(found: Any, network: nn.Module) -> None:
    images, labels, _ = cases()
    case_id = found.result["evaluation"][0]
    at = int(case_id.rpartition("-")[2])
    archive = open_archive(found.folder / "evaluation", ladder="brighter")
    with torch.no_grad():
        weight = next(network.parameters())
        weight.add_(0.1)
        wanted = network(torch.from_numpy(images[at])[None] * 1.5).argmax(1)[0].numpy()
        weight.sub_(0.1)
    assert np.array_equal(archive.mask(case_id, State(2)), wanted)
    rows = found.cases[found.cases["method"] == "brighter: step 2 for everyone"].set_index("case")
    assert rows.loc[case_id, "metric"] == pytest.approx(casewise.dice(wanted, labels[at]))


def test_tables_and_page_are_written(found: Any, tmp_path: Path) -> None:
    page = found.save(tmp_path / "copy")
    text = page.read_text()
    assert "brighter: step 2 for everyone" in text
    assert "http" not in re.sub(r"http://www\.w3\.org\S*|http-equiv", "", text)  # loads nothing
    assert (tmp_path / "copy" / "tables" / "bench.tex").read_text() == found.latex()
    assert (tmp_path / "copy" / "tables" / "bench.csv").read_bytes().decode() == found.csv()
    assert len(list((tmp_path / "copy" / "policies").glob("*.json"))) == len(found.policies)


def test_a_recording_is_read_again_without_a_network(found: Any) -> None:
    again = casewise.bench(
        None, found.folder / "evaluation", calibration=found.folder / "calibration", methods=["tent"],
        policies=["frag-stop"], alpha=0.5,
    )  # fmt: skip
    pair = [one.table.set_index("method").loc["tent: frag-stop", "gain"] for one in (found, again)]
    assert pair[0] == pair[1]


def test_labels_of_calibration_cases_in_the_same_archive_were_not_those_of_the_evaluation(
    network: nn.Module, tmp_path: Path
) -> None:
    images, labels, patients = cases(12)
    labels = [np.roll(label, at, axis=0) for at, label in enumerate(labels)]  # equal labels are one in the ledger
    how = casewise.Adaptation("tent", steps=2, min_area=1)
    archive = casewise.create_archive(
        tmp_path / "archive", binding=how.binding(network), steps=2, configuration={"adaptation": how.as_plain()}
    )
    for at, (image, label, patient) in enumerate(zip(images, labels, patients, strict=True)):
        case = casewise.Case(f"c{at:02}", image, cluster=patient, split="calibration" if at < 6 else "evaluation")
        archive.add(case, casewise.run_episode(network, image[None], how, case_id=case.id), label)
    archive.seal()
    first = casewise.bench(None, tmp_path / "archive", policies=["default"], loss=None)
    assert not first.result["labels_seen_before_decisions"]
    second = casewise.bench(None, tmp_path / "archive", policies=["default", "settled"], loss=None)
    assert second.result["labels_seen_before_decisions"]


def test_patients_can_be_named_for_calibration(network: nn.Module) -> None:
    images, labels, patients = cases(8)
    made = casewise.bench(
        network, images, labels, methods={"mine": brighter}, policies=["frag-stop"], patients=patients, loss=None,
        calibration=["p0", "p1"], adaptation=TWO_STEPS,
    )  # fmt: skip
    assert made.result["calibration"] == ["case-0000", "case-0001", "case-0002", "case-0003"]
    assert all(one["promise"] is None for one in made.result["methods"])


def test_two_processes_make_the_masks_of_one(network: nn.Module) -> None:
    images, labels, patients = cases(8)
    inner = lambda network, image: [network(image).argmax(1)]  # noqa: E731  # no other process can read it
    tables = [
        casewise.bench(
            network, images, labels, methods={"own": brighter, "inner": inner} if jobs is None else {"own": brighter},
            policies="m0", patients=patients, share=0.5, loss=None, adaptation=TWO_STEPS, jobs=jobs,
        ).cases.set_index(["method", "case"])["metric"]
        for jobs in (None, 2)
    ]  # fmt: skip
    assert tables[0][tables[1].index].equals(tables[1])
    casewise.bench(
        network, images, labels, methods=inner, policies="m0", patients=patients, share=0.5, loss=None, jobs=2
    )


def test_an_unnamed_network_is_called_by_its_class(network: nn.Module) -> None:
    assert Module(network, classes=2, dimensions=2).name == "PlainUNet"
    assert Module(network, classes=2, dimensions=2, name="mine").name == "mine"


def test_policies_keep_m0_where_no_method_changes_anything(network: nn.Module, tmp_path: Path) -> None:
    images, labels, _ = cases(24)
    patients = [f"p{at}" for at in range(24)]
    made = casewise.bench(
        network, images, labels, methods={"same": lambda network, image: [network(image).argmax(1)] * 2},
        policies="default", patients=patients, share=0.5, loss=None,
    )  # fmt: skip
    assert not made.result["refused"]
    assert "No method has a higher mean Dice than M0." in made.save(tmp_path).read_text()
    assert "fewer than five" not in made.summary(), "twelve patients; equal values have no interval for another reason"
    row = made.table.set_index("method").loc["same: default"]
    assert (row["gain"], row["policy"]) == (0, "m0")
    assert "default (took m0)" in made.summary()


def _float_masks(network: nn.Module, image: Tensor) -> list[Tensor]:
    return [network(image)]


def _changing_number(network: nn.Module, image: Tensor) -> list[Tensor]:
    return [torch.zeros(image.shape[2:], dtype=torch.long)] * (1 + int(abs(float(image[0, 0, 0, 0])) * 1e6) % 7)


def _one_mask(network: nn.Module, image: Tensor) -> Tensor:
    return network(image).argmax(1)


def _nothing(network: nn.Module, image: Tensor) -> None:
    return None


def _another_class(network: nn.Module, image: Tensor) -> list[Tensor]:
    return [network(image).argmax(1) + 40]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (_float_masks, "integer masks.*argmax"),
        (_changing_number, "masks? for case"),
        (_one_mask, r"returned Tensor.*\[mask\]"),
        (_nothing, "returned NoneType"),
        (_another_class, "classes 0 to"),
        ("tnt", "'tent'"),
        ("view:photo", "no method is called 'view:photo'. Did you mean 'views:photo'"),
        ("best=Views:gamma(1.4)", r"Did you mean 'views:gamma\(1.4\)'"),
        ("tune:1", "Did you mean 'tuned:1'"),
        ("member:/models/a", "Did you mean 'members:/models/a'"),
        ("mine:adapt", "No module named 'mine'"),
        (3, "a method must be"),
        (lambda subject: lambda: 0.5, "an update must return a dict of numbers or None, got float"),
    ],
)
def test_a_method_that_cannot_be_used_is_refused_in_a_sentence(network: nn.Module, method: Any, words: str) -> None:
    images, labels, patients = cases(8)
    with pytest.raises(BadInput, match=words):
        casewise.bench(network, images, labels, methods=[method], patients=patients, share=0.5, adaptation=TWO_STEPS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": []}, "methods is empty"),
        ({"policies": [object()]}, "a policy must be a name, such as 'default'"),
        ({"out": __file__}, "out must be a folder"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_in_a_sentence(
    network: nn.Module, given: dict[str, Any], words: str
) -> None:
    images, labels, patients = cases(8)
    with pytest.raises(BadInput, match=words):
        casewise.bench(network, images, labels, **{"methods": ["tent"], "patients": patients, **given})


def _fails_late(network: nn.Module, image: Tensor) -> list[Tensor]:
    _fails_late.calls = getattr(_fails_late, "calls", 0) + 1  # type: ignore[attr-defined]
    return [network(image).argmax(1)] * 2 if _fails_late.calls == 1 else [][3]  # type: ignore[attr-defined]


def test_an_error_in_a_method_is_told_once_with_its_line(network: nn.Module) -> None:
    images, labels, patients = cases(8)
    with pytest.raises(BadInput) as found:
        casewise.bench(network, images, labels, methods=[_fails_late], patients=patients, share=0.5, jobs=1)
    line = _fails_late.__code__.co_firstlineno + 2
    assert f"list index out of range (IndexError in test_bench.py, line {line})" in str(found.value)
    assert str(found.value).count("IndexError") == 1, "the same error of every case is told once"


def test_images_may_be_generators_or_named(network: nn.Module) -> None:
    images, labels, patients = cases(8)
    how = {"methods": "tent", "policies": "m0", "share": 0.5, "loss": None, "adaptation": TWO_STEPS}
    listed = casewise.bench(network, images, labels, patients=patients, **how)
    drawn = casewise.bench(network, iter(images), iter(labels), patients=patients, **how)
    assert list(listed.cases["metric"]) == list(drawn.cases["metric"])
    ids = [f"case-{at:04d}" for at in range(8)]
    by_name = dict(zip(ids, patients, strict=True))
    named = casewise.bench(
        network, dict(zip(ids, images, strict=True)), dict(zip(ids, labels, strict=True)), patients=by_name, **how
    )
    assert list(listed.cases["metric"]) == list(named.cases["metric"])
    with pytest.raises(BadInput, match="the same names; case-0000 is in one only"):
        casewise.bench(network, dict(zip(ids, images, strict=True)), dict(zip(ids[1:], labels[1:], strict=True)), **how)
    with pytest.raises(BadInput, match="array of numbers"):
        casewise.bench(network, list(zip(images, labels, strict=True)), labels, **how)  # a torch Dataset


def test_methods_may_have_options_of_their_own_and_streams_stand_beside_episodes(
    network: nn.Module, tmp_path: Path
) -> None:
    """CoTTA and EATA in the protocol of their papers beside the episodic one, in one call (issue 35, item 11)."""
    before = fingerprint(network)
    images, labels, patients = cases(12)
    made = casewise.bench(
        network, images, labels, patients=patients, share=0.5, alpha=0.5, out=tmp_path / "out", policies=["default"],
        adaptation=TWO_STEPS,  # its measures are those of all methods, its other options of those without their own
        methods={
            "cotta": "cotta",
            "cotta-stream": casewise.Adaptation("cotta", learning_rate=0.01, steps=2, reset="stream"),
            "eata-stream": casewise.Adaptation("eata", learning_rate=0.02, steps=1, reset="stream"),
        },
    )  # fmt: skip
    assert fingerprint(network) == before
    ladders = open_archive(tmp_path / "out" / "evaluation").manifest["ladders"]
    assert "order" not in ladders["cotta"]["configuration"]
    assert ladders["eata-stream"]["configuration"]["order"] == made.result["evaluation"]
    assert ladders["eata-stream"]["configuration"]["adaptation"]["learning_rate"] == 0.02
    assert {"cotta: step 2 for everyone", "eata-stream: step 1 for everyone"} <= set(made.table["method"])
    certified = [one for one in made.result["methods"] if one["promise"]]
    assert certified
    for one in certified:
        assert any("in a stream" in note for note in one["notes"]) == ("stream" in one["name"])


def test_one_method_may_be_given_alone_and_labels_as_whole_floats(network: nn.Module) -> None:
    images, labels, patients = cases(8)
    with torch.inference_mode():  # a method may still make gradients
        made = casewise.bench(
            network, [torch.from_numpy(image) for image in images], [label.astype(float) for label in labels],
            methods=_trains, policies="m0", patients=patients, share=0.5, loss=None, adaptation=TWO_STEPS,
        )  # fmt: skip
    assert list(made.table["method"])[1] == "trains: step 1 for everyone"


def _trains(network: nn.Module, image: Tensor) -> Any:
    logits = network(image)
    logits.mean().backward()
    yield logits.argmax(1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda label: label * 0.5, "label of image 0 holds float"),
        (lambda label: np.where(label, np.nan, 0), "label of image 0 holds float"),
        (lambda label: label * 9, "image 0 holds 9.*ignore=255"),
        (lambda label: label[None], "channels first"),
    ],
)
def test_a_label_that_cannot_be_used_is_named_before_anything_is_recorded(
    network: nn.Module, wrong: Any, words: str
) -> None:
    images, labels, patients = cases(8)
    with pytest.raises(BadInput, match=words):
        casewise.bench(network, images, [wrong(label) for label in labels], methods=["tent"], patients=patients)


def test_wrong_patients_and_a_wrong_alpha_are_named(network: nn.Module) -> None:
    images, labels, patients = cases(8)
    with pytest.raises(BadInput, match="nobody"):
        casewise.bench(network, images, labels, methods=["tent"], patients=patients, calibration="nobody")
    with pytest.raises(BadInput, match="between 0 and 1, got 2"):
        casewise.bench(network, images, labels, methods=["tent"], patients=patients, alpha=2)


def test_images_need_a_network_and_labels(network: nn.Module) -> None:
    images, labels, _ = cases(4)
    with pytest.raises(BadInput, match="network"):
        casewise.bench(None, images, labels)
    with pytest.raises(BadInput, match="labels"):
        casewise.bench(network, images)


def test_the_example_of_the_documentation_runs_as_printed(
    network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten lines of Python for a researcher with a network of their own (issue 35)."""
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "bench.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    images, labels, patients = cases(16)
    exec(code, {"network": network, "images": images, "labels": labels, "patients": patients})
    assert "mine: step 2 for everyone" in capsys.readouterr().out
    assert (tmp_path / "bench" / "bench.html").exists()


def test_notes_say_where_ha_judges_little_and_name_a_no_go_once(found: Any) -> None:
    result = json.loads(json.dumps(dict(found.result)))
    for one in result["methods"]:
        one["scores"]["judged"], one["promise"], one["notes"] = 0.9, None, []
    assert not any("judges less" in note for note in replace(found, result=result).notes())
    plain, certified = result["methods"][1], result["methods"][2]
    plain["scores"]["judged"] = 0.0
    plain["notes"], certified["notes"] = ["a: NO-GO: 1 was hurt"], ["a, certified: NO-GO: 1 was hurt"]
    certified["promise"] = {"loss": "ha", "alpha": 0.4, "realized": 0.1, "missed": False}
    notes = replace(found, result=result).notes()
    assert sum("NO-GO" in note for note in notes) == 1
    assert any("In 1 row HA judges less than half" in note for note in notes)


def test_a_result_prints_its_table_and_notes(found: Any) -> None:
    printed = repr(found)
    assert all(name in printed for name in found.table["method"])
    assert len(printed.splitlines()) < 40
