"""Records from files: an address planted in any field of any record runs nothing, and a wrong type is one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from casewise.adapt.adaptation import Adaptation, proposers_of
from casewise.adapt.backbones import load_backbone
from casewise.adapt.backbones.checkpoints import read_checkpoint
from casewise.adapt.probes import probes_of
from casewise.adapt.tuned_weights import TunedWeights
from casewise.archive.layout import Entry
from casewise.archive.layout import read_json as read_archive_json
from casewise.archive.store import create_archive, open_archive
from casewise.archive.verify import verify
from casewise.cli import monitor
from casewise.core.chain import Chain
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, CasewiseError, DamagedArchive, UnsafeInput
from casewise.core.formats import json_text
from casewise.core.json_records import from_plain, read_json
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Action, Binding, Decision, Policy, State
from casewise.core.registry import addresses_in, check_names_no_code, from_address
from casewise.deployment.saved import read_description
from casewise.judge import ledger
from casewise.judge.calibration.adoption import hurt_share, unpromised
from casewise.judge.certificates.certificate import Certificate, read_certificate, write_certificate
from casewise.judge.monitors.audits import Audit
from casewise.judge.monitors.quota import quota_drift
from casewise.judge.monitors.watch import Watch, read_watch, write_watch
from casewise.judge.policy import READY, _hashed, judge_of, no_go, read_policy, write_policy
from casewise.run import take_over
from casewise.run.prediction_folder import decisions_in, verify_predictions
from casewise.serve.review_log import ReviewLog

BINDING = Binding("m", "tent", "array", "min_area=16")
ADAPTATION = json.loads(json_text(Adaptation("views:mri", consensus="vote").as_plain()))
POLICY = Policy(
    "mine", "router", {**READY["cardiac"].options, "cut_low": 0.1, "cut_high": 0.2}, 2, BINDING,
    ADAPTATION, "id", ("a",), ("p1",), ("0",), {"site": {"cut_low": 0.2}}, {"retained": {"go": True}},
    ({"reason": "a look"},), "views", {"views": ADAPTATION, "tent": Adaptation("tent").as_plain()},
    flag={"quality": {"middle": 1.0, "ratio": 2.0, "level": 0.9}, "below": 0.5, "steps": 2}, cleanup="largest(1)",
)  # fmt: skip
CERTIFICATE = Certificate(
    "T1", "a promise", "ha", "crc", 0.1, None, "patients like these", 10, 20, 0.05, 9, 0.3, 0.09, 0.5,
    {"before": {"kept": 0.5}}, binding=BINDING, policy="d", curve=({"setting": 0.1},), groups=("site",),
    details={"population": "scored", "more": {"deep": ["x"]}}, warnings=("a sentence",),
)  # fmt: skip
WATCH = Watch("id", {"audit": Audit(0.1)}, ("a",), ("a",), ("p1",), ("p1",), ("p2", (0.1,)))
FREE = ("binding", "calibration_clusters", "cohort", "exposures", "decided_patients", "audited_patients", "waiting")
"""Fields that hold names of patients or sentences, and a binding, which is compared and never looked up."""


@pytest.fixture(autouse=True)
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported from here and leaves a proof when it is."""
    (tmp_path / "evil.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'proof')!r})\ndef sig(*_): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "proof"
    sys.modules.pop("evil", None)


def planted(plain: Any, at: tuple[Any, ...] = (), address: str = "evil:sig") -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The record with an address instead of each leaf, beside each item and as each key; and where it was planted."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        for place, changed in planted(value, (*at, key), address):
            copy = dict(plain) if isinstance(plain, dict) else list(plain)
            copy[key] = changed
            yield place, copy
    if isinstance(plain, list):
        yield at, [*plain, address]
    elif isinstance(plain, dict) and at:
        yield at, {**plain, address: 1}
        yield at, {**plain, "signals": [address]}
    elif not isinstance(plain, dict):
        yield at, address
        yield at, [address]


def used(policy: Policy) -> None:
    """Whatever a run looks up in a policy."""
    proposers_of(policy)
    judge_of(policy)
    for plain in policy.ladders.values():
        how = Adaptation.from_plain(plain)
        probes_of(how.signals)
        assert not how.is_gradient or how.built() is not None


def policy_file(plain: dict[str, Any]) -> None:
    plain = {name: value for name, value in plain.items() if name != "sha256"}
    Path("policy.json").write_text(json.dumps({**plain, "sha256": _hashed(plain)}))
    policy = read_policy("policy.json")
    used(policy)
    unpromised(policy.preflight)
    no_go(policy)
    quota_drift(policy, {"low": 3, "mid": 0, "hard": 0})


def certificate_file(plain: dict[str, Any]) -> None:
    Path("certificate.json").write_text(json.dumps({**plain, "seal": json_sha256(plain)}))
    read_certificate("certificate.json")


def watch_file(plain: dict[str, Any]) -> None:
    Path("watch.json").write_text(json.dumps(plain))
    read_watch("watch.json")


def plain_watch() -> dict[str, Any]:
    return dict(json.loads(write_watch("watch.json", WATCH).read_text()))


def plain_certificate() -> dict[str, Any]:
    plain = dict(json.loads(write_certificate("certificate.json", CERTIFICATE).read_text()))
    plain.pop("seal")
    return plain


RECORDS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "policy": (lambda: json.loads(json_text(asdict(POLICY), default=dict)), policy_file),
    "certificate": (plain_certificate, certificate_file),
    "watch": (plain_watch, watch_file),
    "adaptation": (lambda: ADAPTATION, Adaptation.from_plain),
}


@pytest.mark.parametrize("record", RECORDS)
def test_an_address_in_any_field_of_a_record_is_refused_and_imports_nothing(record: str, proof: Path) -> None:
    make, use = RECORDS[record]
    use(make())
    places = set()
    for place, plain in planted(make()):
        places.add(place)
        if place[0] in FREE or place in (("groups",), ("groups", 0)):  # the names of groups are free
            continue
        with pytest.raises(CasewiseError):
            use(plain)
        assert not proof.exists(), place
        assert "evil" not in sys.modules, place
    assert len(places) > 5


@pytest.mark.parametrize(
    "address",
    ["views:sig", "members:sig", "running:sig", "views:evil:sig", "tuned+views:evil:sig", "evil.more:sig", "évil:sig",
     "evil\n:sig", "evil:sig\n", " evil : sig", "evil．more:sig", "evil:sig.more", "../evil:sig", "evil", "evil.sig"],
)  # fmt: skip
@pytest.mark.parametrize("record", RECORDS)
def test_no_spelling_in_any_field_imports_anything(record: str, address: str, proof: Path) -> None:
    """Modules that are called like proposers, names with dots, line breaks and letters of all languages."""
    for name in ("views", "members", "running", "évil", "evil．more", " evil "):
        Path(f"{name}.py").write_text(Path("evil.py").read_text())
    make, use = RECORDS[record]
    for place, plain in planted(make(), address=address):
        with suppress(CasewiseError):
            use(plain)
        assert not proof.exists(), place


def test_what_casewise_writes_itself_is_read(proof: Path) -> None:
    assert read_policy(write_policy("policy.json", POLICY)) == POLICY
    assert read_certificate(write_certificate("certificate.json", CERTIFICATE)) == CERTIFICATE
    assert read_watch(write_watch("watch.json", WATCH)) == WATCH


@pytest.mark.parametrize("objective", ["evil:sig", "views:evil:sig", "members:evil:sig", "running:mri,evil:sig"])
def test_a_proposer_cannot_hide_an_address(objective: str, proof: Path) -> None:
    with pytest.raises(UnsafeInput, match="evil:sig"):
        Adaptation.from_plain({**ADAPTATION, "objective": objective})
    assert not proof.exists()


def test_an_archive_with_a_planted_signal_is_neither_whole_nor_deployed(tmp_path: Path, proof: Path) -> None:
    configuration = {"adaptation": {**Adaptation("tent").as_plain(), "signals": ["evil:sig"]}}
    create_archive(tmp_path / "a", binding=BINDING, steps=1, configuration=configuration)
    assert any("evil:sig" in problem for problem in verify(tmp_path / "a"))
    with pytest.raises(UnsafeInput, match="evil:sig"):
        Adaptation.from_plain(open_archive(tmp_path / "a").configuration["adaptation"])
    assert not proof.exists()


def test_addresses_are_found_in_every_spelling() -> None:
    spellings = [
        "evil:Obj",
        "x=evil:Obj",
        "dropout_disagreement, evil:Obj",
        "views:evil:Obj",
        "members:evil:Obj",
        "évil:Obj",
        "a.b:C",
    ]
    assert all(list(addresses_in([[{"key": text}]])) for text in spellings)
    assert list(addresses_in(["views:Net", "members:Net"], proposers=False)) == ["views:Net", "members:Net"]
    assert not list(addresses_in(["views:mri", "members:folds", "a sentence: with a colon", "12:30", "views-mri:3"]))


@pytest.mark.parametrize(
    "address", ["1evil:sig", "evil:1", "evil-x:sig", "evil :sig", " evil:sig", "evil:sig\n", ".evil:sig", "a/evil:sig"]
)
def test_what_is_not_found_as_an_address_is_never_imported(address: str, tmp_path: Path, proof: Path) -> None:
    """Python imports a file of any name; a search for addresses finds only identifiers."""
    for name in ("1evil", "evil-x", "evil ", " evil"):
        (tmp_path / f"{name}.py").write_text((tmp_path / "evil.py").read_text())
    with pytest.raises(BadInput, match="an address is"):
        from_address(address, "signal")
    assert not proof.exists()
    with pytest.raises(CasewiseError):
        load_backbone(address)
    assert not proof.exists()


def test_names_of_patients_and_groups_are_free() -> None:
    free = {"calibration_clusters": ["site:Anna"], "groups": {"site:Anna": {"cut_low": 1.0}}, "exposures": ["a:b"]}
    check_names_no_code(free, where="the file")
    with pytest.raises(UnsafeInput, match="the file names code in groups: 'evil:sig'"):
        check_names_no_code({"groups": {"site": {"signal": "evil:sig"}}}, where="the file")


def test_what_was_typed_may_stand_in_a_file() -> None:
    check_names_no_code({"controller": "mine:Own"}, where="the file", typed=("mine:Own",))
    with pytest.raises((UnsafeInput, BadInput)):
        check_names_no_code({"controller": "mine:Own"}, where="the file", typed=("mine:Other",))


# ---- values of another type, and files that are no JSON ----

ODD: tuple[Any, ...] = (None, -1, 10**30, 0.5, True, "x", "inf", [], [[[]]], {}, {"a": {"b": [1]}})


def spoiled(plain: Any) -> Iterator[Any]:
    """The record with each value replaced by an odd one, another at each place, or left out."""
    items = list(plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ())
    for place, (key, value) in enumerate(items):
        for part in (*spoiled(value), *(ODD * 2)[3 * place % len(ODD) :][:1]):
            copy = dict(plain) if isinstance(plain, dict) else list(plain)
            copy[key] = part
            yield copy
        if isinstance(plain, dict):
            yield {name: part for name, part in items if name != key}


def taken_or_refused(use: Callable[[Any], Any], plain: Any) -> bool:
    """True if it was refused in a sentence; an error of another kind fails the test."""
    try:
        use(plain)
    except CasewiseError:
        return True
    return False


def deployment_file(plain: Any) -> None:
    content = {name: value for name, value in plain.items() if name != "sha256"}
    Path("deployment.json").write_text(json.dumps({**content, "sha256": json_sha256(content)}))
    read_description(Path())


def manifest_file(plain: Any) -> None:
    Path("manifest.json").write_text(json.dumps(plain))
    open_archive(".")


DECISION = Decision("a", Action.KEEP, State(2, 0.5), 2, "router", value=0.1, accepted=(1, 2), quality=0.9)
HARM = asdict(hurt_share([0.02] * 10, list("abcdefghij")))
PREFLIGHT = {
    "comparison": {"chosen": "medoid", "rows": [{"design": "m0", "harm": HARM}, {"design": "medoid", "harm": HARM}]},
    "quota": {"low": 3, "mid": 4, "hard": 3},
    "retained": {"go": False, "reason": "a loss"},
}
MORE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an entry of an archive": (
        lambda: Entry("a", (4, 4), spacing_mm=(1.0, 1.0), states=(State(0),), diagnostics=({"loss": 1.0},)).as_dict(),
        Entry.from_dict,
    ),
    "an entry of a prediction": (
        lambda: PredictedCase("a", "done", DECISION, signals={"0": {"delta": 0.0, "msp": None}}).as_dict(),
        PredictedCase.from_dict,
    ),
    "a deployment": (
        lambda: {
            "schema": 1,
            "model": {"fingerprint": "f", "name": "n"},
            "contract": "refuse",
            "force": False,
            "max_ram": None,
            "files": {"policy.json": "h"},
        },
        deployment_file,
    ),
    "what calibration found": (
        lambda: {**json.loads(json_text(asdict(POLICY), default=dict)), "preflight": PREFLIGHT},
        policy_file,
    ),
    "a manifest": (
        lambda: {
            "schema": 3,
            "ladders": {
                "one": {
                    "binding": asdict(Binding("m", "o", "l", "w")),
                    "steps": 1,
                    "configuration": {"min_area": 16, "classes": [1, 2], "adaptation": {}, "metric": "dice"},
                }
            },
            "cases": {"a": {"sha256": "h", "split": None, "ladders": {"one": "h"}}},
        },
        manifest_file,
    ),
}


@pytest.mark.parametrize("record", [*RECORDS, *MORE])
def test_a_value_of_another_type_is_refused_in_a_sentence(record: str) -> None:
    make, use = {**RECORDS, **MORE}[record]
    plain = json.loads(json.dumps(make()))
    refused = [taken_or_refused(use, one) for one in spoiled(plain)]
    assert sum(refused) > len(refused) / 3


@pytest.mark.parametrize(
    ("setting", "value"),
    [("min_area", "evil:sig"), ("min_area", float("inf")), ("classes", 1), ("classes", [1, None]), ("metric", ["dice"]),
     ("adaptation", "evil:sig"), ("adaptation", 3), ("names", []), ("ignore", 10**30)],
)  # fmt: skip
def test_a_setting_of_another_type_damages_an_archive(setting: str, value: Any, tmp_path: Path) -> None:
    create_archive(tmp_path, binding=BINDING, steps=1, configuration={"dataset": "hearts"})
    plain = json.loads((tmp_path / "manifest.json").read_text())
    plain["configuration"][setting] = value
    (tmp_path / "manifest.json").write_text(json.dumps(plain))
    with pytest.raises(DamagedArchive, match=setting):
        open_archive(tmp_path)
    assert setting in verify(tmp_path)[0]


def test_an_archive_whose_adaptation_is_null_is_continued_or_refused(tmp_path: Path) -> None:
    create_archive(tmp_path, binding=BINDING, steps=1, configuration={"adaptation": None})
    with pytest.raises(CasewiseError, match="another configuration"):
        create_archive(tmp_path, binding=BINDING, steps=1, configuration={"adaptation": {"steps": 1}, "seed": 1})


CONTENTS = {
    "empty": b"",
    "half": b'{"schema": 2, "na',
    "a list": b"[]",
    "nested too deeply for Python": b'{"schema":' + b"[" * 100_000,
    "nested deeply": b'{"schema": 2, "options": ' + b"[" * 300 + b"]" * 300 + b"}",
    "a number of ten thousand digits": b'{"schema": ' + b"9" * 10_000 + b"}",
    "no text": b"\xff\xfe\x00\xd8\x00",
}
READERS: tuple[Callable[[Path], Any], ...] = (read_policy, read_certificate, read_watch, read_archive_json, read_json)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_what_is_no_json_object_is_refused_by_every_reader(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    for reader in READERS:
        with pytest.raises(CasewiseError, match=r"file\.json"):
            reader(file)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_every_encoding_of_an_editor_is_read(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes('{\r\n"name": "Ärzte"\r\n}'.encode(encoding))
    assert read_json(tmp_path / "file.json") == {"name": "Ärzte"}


def test_what_a_record_says_is_what_was_written() -> None:
    assert PredictedCase.from_dict(json.loads(json.dumps(MORE["an entry of a prediction"][0]()))).decision == DECISION
    with pytest.raises(BadInput, match=r"the file: step must be int, got True; try again"):
        from_plain(State, {"step": True}, "the file", "try again")
    with pytest.raises(BadInput, match="the file: shrink must be a number of at most 64 bits"):
        from_plain(State, {"step": 1, "shrink": 10**30}, "the file")  # NumPy makes an object of such a number
    with pytest.raises(BadInput, match="the file has an unknown field 'x'"):
        from_plain(State, {"step": 1, "x": 2}, "the file")


# ---- logs: a right hash alone does not make a line right ----

LINES: dict[str, dict[str, Any]] = {
    "run-started": {"to_do": ["a"], "policy": "p"},
    "case": {"case": "a", "status": "done", "outputs": {"a.nii.gz": "h"}, "entry": "h"},
    "run-finished": {"cases": 1, "not_done": 0, "page": True},
    "pages": {"files": {"report.html": "h"}},
    "exposure": {"choice": "calibrate", "policy": "p", "labels": ["l"], "compared": ["medoid"]},
    "certification": {"asked": {"a": 1}, "labels": ["l"]},
    "take-over-started": {"files": ["a.nii.gz"]},
    "taken-over": {"file": "a.nii.gz", "sha256": "h"},
    "apply-started": {"files": ["a.nii.gz"]},
    "applied": {"case": "a", "file": "a.nii.gz", "sha256": "h"},
    "review": {"case": "a", "decision": "flag", "reviewer": "r", "note": "", "about": "x", "adapted": None},
    "sealed": {"sha256": "h"},
}


def read_logs(folder: Path) -> None:
    """Everything that reads a hash-chained log of a folder."""
    verify_predictions(folder, folder / "report.json")
    decisions_in(folder)
    ReviewLog(folder / "reviews.jsonl").latest()
    take_over._check_replaceable(folder, ["a.nii.gz"])
    assert Chain(folder / "audit.jsonl").tip
    archive = open_archive(folder / "archive")
    with suppress(DamagedArchive):  # what a ledger says if a line of it is wrong
        ledger.note_comparison(archive, ["medoid"])
        ledger.compared_designs(archive)
        ledger.earlier_looks(archive, {"medoid"})
        ledger.certification_attempt(archive, {"policy": "p"})


@pytest.mark.parametrize("event", LINES)
def test_a_line_of_a_log_with_a_value_of_another_type_ends_nothing(event: str, tmp_path: Path) -> None:
    create_archive(tmp_path / "archive", binding=BINDING, steps=1, configuration={})
    for number, facts in enumerate([LINES[event], *spoiled(LINES[event])]):
        folder = tmp_path / str(number)
        (folder / "casewise").mkdir(parents=True)
        shutil.copytree(tmp_path / "archive", folder / "archive")
        for log in ("audit.jsonl", "reviews.jsonl", "applied.jsonl", "archive/exposures.jsonl"):
            Chain(folder / log).append("begin", {})
            Chain(folder / log).append(event, facts)
        (folder / "report.json").write_text(json.dumps(facts))
        read_logs(folder)


@pytest.mark.parametrize("content", [*CONTENTS.values(), b"7", b"null", b'{"event": "case"}'])
def test_a_line_of_a_log_that_is_no_line_ends_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "casewise").mkdir()
    create_archive(tmp_path / "archive", binding=BINDING, steps=1, configuration={})
    for log in ("audit.jsonl", "reviews.jsonl", "applied.jsonl", "archive/exposures.jsonl", "stream.jsonl"):
        (tmp_path / log).write_bytes(content + b"\n")
    (tmp_path / "report.json").write_bytes(content)
    read_logs(tmp_path)
    assert verify_predictions(tmp_path)
    with suppress(BadInput):
        list(monitor._rows(tmp_path / "stream.jsonl"))


@pytest.mark.parametrize("key", ["aliases", "checkpoint", "casewise"])
@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[1]", "7", '{"a": {"b": 1}}', '{"a": [1]}', '{"a": null}', "9" * 9999]
)
def test_metadata_of_a_weights_file_are_read_or_refused(key: str, content: str, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "w.safetensors", metadata={key: content})
    for read in (read_checkpoint, TunedWeights.read):
        with suppress(CasewiseError):
            read(tmp_path / "w.safetensors")
