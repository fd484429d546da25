"""Everything that casewise writes is strict JSON, and infinities come back as they were."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive

import casewise
from casewise.cli import app
from casewise.core.formats import json_text, numbered, worded
from casewise.core.records import Decision, Policy
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import policy_digest, read_certificate, write_certificate
from casewise.judge.certificates.certify_gate import certify_gate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.policy import READY, read_policy, write_policy

SOURCE = Path(casewise.__file__).parent


def strict(text: str):
    """Parse as strict readers do: NaN and Infinity are errors."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_written_in_one_place():
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps"):
                found.append(str(path.relative_to(SOURCE)))
    assert found == ["core/formats.py"]


def test_infinities_are_words_and_come_back():
    values = {"a": [math.inf, -math.inf, 1.5, "infinite"], "b": {"c": (0, None, True)}}
    assert numbered(strict(json_text(values))) == {
        "a": [math.inf, -math.inf, 1.5, "infinite"],
        "b": {"c": [0, None, True]},
    }
    assert worded(math.nan) is None
    with pytest.raises(TypeError):
        json_text(object())


def test_a_finite_value_is_written_as_json_does():
    values = {"b": 1, "a": [0.1, "ü", None], 3: (1, 2)}
    assert json_text(values, indent=1) == json.dumps(values, indent=1)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("strict") / "site", cases=24, harmful=0.0, groups=("inf", "B"))


def test_a_gate_that_accepts_everything_is_strict_and_comes_back(archive, tmp_path):
    certificate, policy = certify_gate(archive, READY["region-gate"], loss="envelope", alpha=0.5)
    assert policy.options["threshold"] == -math.inf
    file = write_policy(tmp_path / "policy.json", policy)
    assert strict(file.read_text())["options"]["threshold"] == "-inf"
    assert read_policy(file) == policy
    assert policy_digest(read_policy(file)) == certificate.policy
    assert casewise.replay(archive, read_policy(file)) == casewise.replay(archive, policy)
    again = write_certificate(tmp_path, certificate)
    strict(again.read_text())
    assert read_certificate(again).cut == -math.inf
    assert read_certificate(again).curve == certificate.curve


def test_a_router_that_keeps_everything_is_strict_and_comes_back(archive, tmp_path):
    policy = calibrate(archive, "cardiac")
    loose = replace(policy, options={**policy.options, "cut_high": math.inf})
    certificate, certified = certify_router(archive, loose, Promise(alphas=(0.5,)))
    assert certificate.cut == math.inf
    file = write_policy(tmp_path / "policy.json", certified)
    strict(file.read_text())
    assert read_policy(file) == certified
    strict(write_certificate(tmp_path, certificate).read_text())
    assert read_certificate(tmp_path) == certificate


def test_replayed_decisions_are_strict_and_come_back(archive, tmp_path):
    policy = calibrate(archive, "cardiac")
    loose = replace(policy, options={**policy.options, "cut_high": math.inf})
    write_policy(tmp_path / "policy.json", loose)
    words = ["replay", str(archive.path), str(tmp_path / "policy.json"), "-o", str(tmp_path / "decisions.jsonl")]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    lines = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert [Decision.from_dict(strict(line)) for line in lines] == casewise.replay(archive, loose)


def test_names_are_never_taken_for_numbers(tmp_path):
    policy = Policy("inf", "fixed-k", {"step": 1}, 4, calibration_cases=("inf", "-inf"))
    assert read_policy(write_policy(tmp_path / "policy.json", policy)) == policy
