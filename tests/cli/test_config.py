"""casewise.toml holds what a project repeats, and completion knows the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.commands import typed as casewise


def planned(at: Path, *words: str) -> str:
    return casewise("certify", "--sample-size", *words, at=at).stdout


def test_options_come_from_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    without = planned(tmp_path)
    (tmp_path / "casewise.toml").write_text("[certify]\nalpha = 0.2\n")
    from_file = planned(tmp_path)
    assert from_file != without
    assert from_file == casewise("certify", "--sample-size", "--alpha", "0.2", at=tmp_path.parent).stdout
    assert (
        planned(tmp_path, "--alpha", "0.1")
        == casewise("certify", "--sample-size", "--alpha", "0.1", at=tmp_path.parent).stdout
    )


def test_the_common_table_gives_only_what_a_command_has(tmp_path: Path) -> None:
    (tmp_path / "casewise.toml").write_text('[all]\nalpha = 0.2\nmodel = "x"\n')
    assert planned(tmp_path) == casewise("certify", "--sample-size", "--alpha", "0.2", at=tmp_path.parent).stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[certify]\nalpa = 0.2\n", "no option of casewise certify is called 'alpa'. Did you mean 'alpha'?"),
        (
            "[certfy]\nalpha = 0.2\n",
            "casewise.toml: no table of a casewise.toml is called 'certfy'. Did you mean 'certify'?",
        ),
        ("alpha = 0.2\n", "casewise.toml: alpha must stand below a table such as [all] or [predict]"),
        ("[certify\n", "casewise.toml is not TOML"),
        ("x = " + "[" * 5000, "casewise.toml is not TOML"),
        ("[certify]\nalpha = 'much'\n", "Invalid value for '--alpha'"),
    ],
)
def test_what_the_file_gets_wrong_is_reported_in_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "casewise.toml").write_text(text)
    done = casewise("certify", "--sample-size", at=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_cannot_trust_and_a_found_file_cannot_name_code(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    words = ("record", "-i", "in", "-o", "out", "-m", "nothing")
    (tmp_path / "casewise.toml").write_text("[record]\ntrust = ['checkpoint']\n")
    assert "trust allows code to run, so give it on the command line" in casewise(*words, at=tmp_path).stderr
    (tmp_path / "casewise.toml").write_text('[record]\nobjective = "evil:Thing"\n')
    done = casewise(*words, at=tmp_path)
    assert "objective = 'evil:Thing' names code to run" in done.stderr
    assert "--config casewise.toml" in done.stderr
    assert not (tmp_path / "ran").exists()
    named = casewise("--config", "casewise.toml", *words, at=tmp_path)
    assert "names code" not in named.stderr
    assert "options from casewise.toml: objective" in named.stderr


@pytest.mark.parametrize(
    ("key", "hint"),
    [("flag-belo", " Did you mean 'flag-below'?"), ("verbos", " Did you mean 'verbose'?"), ("updates", "")],
)
def test_a_suggestion_is_close_and_may_be_an_option_or_a_setting(tmp_path: Path, key: str, hint: str) -> None:
    """No name is better than one that only shares some letters: 'flag-belo' got 'labels'."""
    words = ("fit", "-i", "in", "-l", "labels", "-o", "out", "-m", "nothing")
    assert f"is called '{key}'.{hint} Known:" in casewise(*words, "--set", f"{key}=1", at=tmp_path).stderr
    (tmp_path / "casewise.toml").write_text(f"[fit]\n{key} = 1\n")
    assert f"is called '{key}'.{hint} Known:" in casewise(*words, at=tmp_path).stderr


@pytest.mark.parametrize(
    ("typed", "place", "wanted"), [("casewise pre", "1", "predict"), ("casewise predict --pol", "2", "--policy")]
)
def test_the_shell_completes_commands_and_options(tmp_path: Path, typed: str, place: str, wanted: str) -> None:
    done = casewise(at=tmp_path, _CASEWISE_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=place)
    assert wanted in done.stdout.split()


def test_completion_can_be_shown_for_every_shell(tmp_path: Path) -> None:
    chosen = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # there may be no shell around the tests
    for shell in ("bash", "zsh", "fish"):
        assert "_CASEWISE_COMPLETE" in casewise("--show-completion", shell, at=tmp_path, **chosen).stdout
