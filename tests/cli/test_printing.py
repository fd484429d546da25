"""Answers as JSON, progress off a terminal, and a policy that is never overwritten in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive
from worlds.updates import heart, write

from casewise.archive.store import open_archive
from casewise.cli import COMMANDS, app
from casewise.cli.printing import Progress
from casewise.core.errors import BadInput
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort


def said(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result.stdout


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return Path(synthetic_archive(tmp_path / "a", cases=12).path)


MODEL = ("-m", "casewise.adapt.networks:phantom_cardiac", "-device", "cpu")
VIEWS = ("--propose", "views:mirror(x),gamma(1.4)")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the commands below read: two phantom hearts, archives, policies, an update, predictions."""
    folder = tmp_path_factory.mktemp("json")
    write_cohort(cardiac_cohort("B", 2, split="evaluation"), folder / "data")
    for name, seed, split in (("holdout", 1, "calibration"), ("stream", 2, "evaluation")):
        synthetic_archive(folder / name, cases=12, seed=seed, prefix=name, split=split)
    said("calibrate", folder / "holdout", "--policy", "cardiac")
    for number in range(12):
        new = heart()
        new[2, 8 : 9 + number // 2, 22:27] = 0  # larger and larger bites
        for name, mask in (("old", heart()), ("new", new), ("truth", new if number < 8 else heart())):
            write(folder / name, f"k{number:02d}", mask)
    masks = ("--old", folder / "old", "--new", folder / "new", "--labels", folder / "truth", "--method", "v2")
    said("import", *masks, "-o", folder / "imported", "--set", "min-area=1")
    said("calibrate", folder / "imported", "--policy", "update", "-o", folder / "update.json")
    said("predict", *MODEL, "-i", folder / "data" / "images", "-o", folder / "masks", "--policy", "m0")
    for split, cases in (("calibration", 4), ("evaluation", 4), ("fit", 5)):
        write_cohort(cardiac_cohort("B", cases, split=split), folder / split)
    torch.save({"state_dict": {"w": torch.ones(2)}}, folder / "weights.pth")
    return folder


def _images(home: Path) -> tuple[object, ...]:
    return (*MODEL, "-i", home / "data" / "images")


CALLS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "inspect": lambda home, out: (home / "data",),
    "predict": lambda home, out: (*_images(home), "-o", out, "--policy", "m0"),
    "compare": lambda home, out: (home / "old", home / "new", "-o", out),
    "qc": lambda home, out: (*[home / "data" / "labels"] * 3, "-o", out),
    "record": lambda home, out: (*_images(home), "-o", out, "--steps", 1),
    "import": lambda home, out: ("--old", home / "data" / "labels", "--new", home / "data" / "labels", "-o", out),
    "fit": lambda home, out: (
        *MODEL, "-i", home / "fit" / "images", "-l", home / "fit" / "labels", "-o", out, "--no-learn",
        "--views", "light", "-j", 1,
    ),
    "calibrate": lambda home, out: (home / "holdout", "--policy", "cardiac", "-o", out / "policy.json"),
    "replay": lambda home, out: (home / "holdout", home / "holdout"),
    "study": lambda home, out: (
        home / "stream", "-c", home / "holdout", "-o", out, "--only", "helphurt", "--set", "pictures=0", "--set",
        "resamples=100",
    ),
    "bench": lambda home, out: (
        home / "evaluation", "--calibration", home / "calibration", *MODEL, *VIEWS, "-o", out / "bench"
    ),
    "certify": lambda home, out: (home / "holdout", "--alpha", 0.6),
    "monitor": lambda home, out: ("--calibration", home / "holdout", "--state", out / "watch.json"),
    "review": lambda home, out: (home / "masks", "--apply", "-o", out),
}  # fmt: skip
"""How each command that prints results is asked; its own words are tested where the command is."""
MODES: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "certify --sample-size": lambda home, out: (),
    "inspect": lambda home, out: (home / "holdout",),
    "inspect --convert": lambda home, out: (home / "weights.pth",),
}  # fmt: skip
"""The other modes of a command."""


@pytest.mark.parametrize("command", [*CALLS, *MODES])
def test_stdout_is_one_json_document(command: str, home: Path, tmp_path: Path) -> None:
    asked = {**CALLS, **MODES}[command]
    words = [*command.split(), *map(str, asked(home, tmp_path)), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code in (0, 1, 3, 4), f"{result.output} {result.exception!r}"
    document = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert isinstance(document, dict)
    assert document
    if command in ("record", "predict"):
        assert "2 of 2 cases" in result.stderr


def test_m0_says_that_nothing_was_adapted(home: Path, tmp_path: Path) -> None:
    told = said("predict", *_images(home), "-o", tmp_path / "out", "--policy", "m0")
    assert told.startswith("2 masks: all are the model's own (M0).")


def test_patients_are_read_from_the_table_beside_the_images(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "calibration", tmp_path / "data")
    table = tmp_path / "data" / "cases.csv"
    ids = [line.partition(",")[0] for line in table.read_text().splitlines()[1:]]
    table.write_text("".join(["case,patient\n", *(f"{name},{'ann' if name < ids[2] else 'bob'}\n" for name in ids)]))
    words = ("record", *MODEL, "-i", tmp_path / "data" / "images", "-l", tmp_path / "data" / "labels", "--steps", 1)
    result = CliRunner().invoke(app, [str(word) for word in (*words, "-o", tmp_path / "a")], catch_exceptions=False)
    assert f"{table} says which patient and which group a case belongs to (4 cases of 2 patients)" in result.stderr
    assert [open_archive(tmp_path / "a").entries[name].cluster for name in ids] == ["ann", "ann", "bob", "bob"]
    table.write_text("case,patient\nelse,ann\n")  # a table about other cases: said, and not used
    result = CliRunner().invoke(app, [str(word) for word in (*words, "-o", tmp_path / "b")], catch_exceptions=False)
    assert result.exit_code == 0
    lost = f"cases.csv has no row for {', '.join(ids)} (4 of 4 cases; its first row is about else)"
    how = "add them if patients have several scans, or name another table with --groups"
    assert f"{table} is not used: {lost}; {how}" in result.stderr
    assert "no patient is named, so every case counts as one" in result.stderr


def test_every_command_that_prints_results_is_asked_for_json() -> None:
    """The demo is asked in test_phantoms.py, since it takes its time; the service prints no result."""
    assert set(CALLS) | {"demo"} == set(COMMANDS) - {"serve"}


def test_a_policy_that_says_something_else_is_moved_aside(archive: Path) -> None:
    said("calibrate", archive, "--policy", "cardiac")
    first = (archive / "policy.json").read_text()
    assert "the earlier policy" not in said("calibrate", archive, "--policy", "cardiac")
    told = said("calibrate", archive, "--policy", "frag-stop")
    assert f"the earlier policy was copied to {archive / 'policy-previous-1.json'}" in told
    assert (archive / "policy-previous-1.json").read_text() == first


def test_progress_off_a_terminal_says_how_long_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, every_s=0.0) as progress:
        for name in ("a", "b", "c"):
            progress.step(f"{name}: done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 of 3 cases"
    assert lines[1].startswith("2 of 3 cases, about ")
    assert lines[1].endswith(" left")
    assert lines[2].startswith("3 of 3 cases, ")


def test_the_time_of_the_first_case_does_not_count() -> None:
    """It also loads the model: 400 updates after a first one of a minute would be "6 h left"."""
    progress = Progress(11, title="propose")
    progress.step("a")
    first = progress._first_at
    assert progress.line(progress._began + 30) == "propose: 1 of 11 cases"
    progress.step("b")
    assert progress.line(first + 2) == "propose: 2 of 11 cases, about 18 s left"


def test_a_long_run_does_not_flood_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000) as progress:
        for number in range(1000):
            progress.step(f"{number}")
    assert len(capsys.readouterr().err.splitlines()) == 2  # the first and the last


def test_quiet_says_only_what_went_wrong_and_verbose_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    for options, expected in (({"quiet": True}, ["b: failed"]), ({"verbose": True}, ["a: done", "b: failed"])):
        with Progress(2, **options) as progress:
            progress.step("a: done")
            progress.step("b: failed", bad=True)
        assert capsys.readouterr().err.splitlines() == expected


FOREIGN: dict[str, tuple[str, Callable[[Path, Path], tuple[object, ...]]]] = {
    "demo": ("notes.txt", lambda home, out: ("-o", out)),
    "certify": ("certificate.html", lambda home, out: (home / "holdout", "--alpha", 0.6, "--out", out)),
    "import": ("cases/a.txt", lambda home, out: ("--old", home / "old", "--new", home / "new", "-o", out)),
    "record": ("cases/a.txt", lambda home, out: (*_images(home), *VIEWS, "-o", out)),
    "inspect --convert": ("weights.safetensors", lambda home, out: (shutil.copy(home / "weights.pth", out),)),
}
"""A file of somebody else where each command writes one of its own."""


@pytest.mark.parametrize("command", FOREIGN)
def test_files_of_somebody_else_are_left_alone(command: str, home: Path, tmp_path: Path) -> None:
    name, words = FOREIGN[command]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    result = CliRunner().invoke(app, [*command.split(), *map(str, words(home, tmp_path))])
    assert isinstance(result.exception, BadInput)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [("s.csv", "case,value\na,abc\n"), ("s.jsonl", '{"case": "a", "value": 1}\nnoise\n'), ("s.jsonl", "[1]\n"),
     ("s.jsonl", '{"case": "a", "value": {}}\n')],
)  # fmt: skip
def test_a_damaged_stream_is_no_alarm(home: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    words = ["monitor", tmp_path / name, "--calibration", home / "holdout", "--state", tmp_path / "watch.json"]
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, BadInput)
    assert not (tmp_path / "watch.json").exists()


def test_a_study_without_labels_is_refused_before_the_ledger_notes_it(home: Path, tmp_path: Path) -> None:
    blind = synthetic_archive(tmp_path / "blind", cases=4, seed=5, prefix="blind", split="evaluation", labelled=False)
    result = CliRunner().invoke(app, ["study", str(blind.path), "-c", str(home / "holdout"), "-o", str(tmp_path / "o")])
    assert isinstance(result.exception, BadInput)
    assert "blind has no labelled case" in str(result.exception)
    assert not (blind.path / "exposures.jsonl").exists()


@pytest.mark.parametrize("words", [("--set", "places=0"), ("--port", "99999")])
def test_a_service_that_nobody_could_reach_is_refused(words: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["serve", *map(str, MODEL), "--policy", "nothing-of-this-name", *words])
    assert result.exit_code == 2
    assert f"Invalid value for '{' '.join(words).partition('=')[0] if '=' in words[1] else words[0]}'" in result.stderr


def test_the_remaining_time_follows_a_machine_that_becomes_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("casewise.cli.printing.time.monotonic", lambda: now[0])
    progress = Progress(400, unit="update")
    for number in range(360):
        now[0] += 1 if number < 300 else 5
        progress.step("")
    said = capsys.readouterr().err.splitlines()[-1]
    assert int(said.partition("about ")[2].split()[0]) in (3, 4)  # minutes: 40 updates of 5 s; all together say 66 s


def test_the_log_of_a_long_run_has_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("casewise.cli.printing.time.monotonic", lambda: now[0])
    progress = Progress(10_000)
    for _ in range(10_000):
        now[0] += 1
        progress.step("")
    assert len(capsys.readouterr().err.splitlines()) < 120  # 667 with a line every 15 seconds
