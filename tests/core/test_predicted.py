"""The entry of a predicted case: one JSON dialect, others are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from casewise.core.errors import BadInput, Mismatch
from casewise.core.formats import json_bytes
from casewise.core.prediction_record import ContractFinding, PredictedCase
from casewise.core.records import Action, Decision, State
from casewise.run.prediction_folder import Layout, read_entry, write_entry

INFINITE = float("inf")
DECISION = Decision("heart", Action.GATE, State(1), 1, "gate", cut_low=INFINITE, cut_high=-INFINITE, accepted=(0,))
ENTRY = PredictedCase(
    "heart", "done", DECISION, outputs={"heart.nii.gz": "ab"},
    contract=(ContractFinding("warning", "spacing", "thick"),),
    signals={"0": {"delta": 0.0}, "1": {"delta": 0.5, "entropy_on_d": None}}, diagnostics=({"loss": 0.5},),
    regions=({"number": 0, "at": [1, 2]},), timing={"total_s": 1.5},
)  # fmt: skip


def test_an_entry_comes_back_from_its_file_as_it_was_written(tmp_path: Path) -> None:
    layout = Layout(tmp_path, ".nii.gz")
    write_entry(layout, ENTRY)
    assert read_entry(layout.entry("heart")) == ENTRY


def test_infinite_cuts_are_words() -> None:
    plain = json.loads(json_bytes(ENTRY.as_dict()))
    assert (plain["decision"]["cut_low"], plain["decision"]["cut_high"]) == ("inf", "-inf")


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"schema": 9}, Mismatch, r"has schema 9, this casewise reads 2; predict again"),
        ({"status": "fine"}, BadInput, "must be done, fallback, failed, got 'fine'"),
        ({"surprise": 1}, BadInput, "not the JSON file of a predicted case .*surprise"),
        ({"case": "../up"}, BadInput, "a case id must have"),
        ({"outputs": {"../../etc/passwd": "0"}}, BadInput, "names an output outside its folder"),
        ({"outputs": {"/etc/passwd": "0"}}, BadInput, "names an output outside its folder"),
    ],
)
def test_what_is_no_entry_is_refused(changes: dict[str, object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        PredictedCase.from_dict({**ENTRY.as_dict(), **changes})
