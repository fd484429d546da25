"""Links in the documentation lead somewhere, and every command in it is one that the program takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive
from worlds.updates import heart, update, write

import casewise
from casewise.adapt.networks import phantom_cardiac
from casewise.cli import COMMANDS as COMMAND_NAMES
from casewise.cli import app
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import write_policy

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HERE = "tests/test_docs.py"
RUN = {  # pages whose commands run as printed, and the test that runs them
    "docs/how-to/bench.md": HERE,
    "docs/how-to/certify.md": HERE,
    "docs/how-to/compare.md": HERE,
    "docs/how-to/configure.md": "tests/cli/test_config.py",
    "docs/how-to/huggingface.md": "tests/cli/test_driving.py",
    "docs/how-to/import-masks.md": HERE,
    "docs/how-to/monitor.md": HERE,
    "docs/how-to/plan.md": HERE,
    "docs/how-to/study.md": "tests/cli/test_cli_study.py",
    "docs/tutorial/hospital.md": "tests/test_tutorial.py",
    "docs/tutorial/new-version.md": "tests/test_tutorial.py",
    "docs/tutorial/research.md": "tests/test_tutorial.py",
}
NOT_RUN = "<!-- not run:"  # a page whose commands need what no test has says why


def commands(page: Path) -> Iterator[str]:
    """The casewise commands in the code of a page, with continued lines joined and remarks left out."""
    fenced = False
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and re.match(r"\s*(\$ )?casewise \S", line):
            yield re.sub(r"\s+#.*|^\s*(\$ )?casewise ", "", line).replace("[", "").replace("]", "")


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if not (page.parent / link.split("#")[0]).exists()]
    assert not broken, f"{page.relative_to(ROOT)} links to {broken}"


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p.stem}: {c[:60]}" for p, c in COMMANDS])
def test_every_command_is_one_that_the_program_takes(page: Path, command: str) -> None:
    import typer

    program = typer.main.get_command(app)
    name, *words = shlex.split(command)
    if name.startswith("-"):
        assert name in {option for parameter in program.params for option in parameter.opts}
        return
    found = program.get_command(program.make_context("casewise", [], resilient_parsing=True), name)
    assert found is not None, f"{page.name}: there is no command {name}"
    found.make_context(name, [word for word in words if word != "..."], resilient_parsing="..." in words)


def test_every_page_with_commands_runs_or_says_why_not() -> None:
    silent = {
        str(page.relative_to(ROOT))
        for page, _ in COMMANDS
        if str(page.relative_to(ROOT)) not in RUN and NOT_RUN not in page.read_text(encoding="utf-8")
    }
    assert not silent, f"run the commands of {sorted(silent)} in a test, or write {NOT_RUN} why -->"
    assert all((ROOT / test.split("::")[0]).exists() for test in RUN.values())


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(page.name[:4]) for page in (ROOT / "docs" / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_pages_of_the_site_are_made_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    import reference  # type: ignore[import-not-found]

    pages = reference.pages()
    assert all(f"### {name}\n" in pages["commands.md"] for name in COMMAND_NAMES)
    assert "`--flag-below`" in pages["commands.md"]
    assert "| `tent` | " in pages["names.md"]
    assert not re.search(r"\| +\|$", pages["names.md"], re.MULTILINE), "a registered name has no sentence"


def ran(page: str) -> list[str]:
    """Run the commands of a page in order, here; what each said."""
    said = []
    for command in commands(ROOT / page):
        outcome = CliRunner().invoke(app, shlex.split(command))
        assert outcome.exit_code == 0, f"casewise {command}: {outcome.output} {outcome.exception}"
        said.append(outcome.output)
    return said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")
def test_the_commands_about_certificates_run_as_printed(here: Path) -> None:
    write_policy(here / "A", calibrate(synthetic_archive(here / "A", cases=60, seed=1), "cardiac"))
    said = ran("docs/how-to/certify.md")
    assert len(said) == 8


@pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")
def test_the_commands_about_monitors_run_as_printed(here: Path) -> None:
    hearts = cardiac_cohort("B", 8, split="target")
    cases = [hearts.case(name) for name in hearts.ids]
    labels = [hearts.label(name) for name in hearts.ids]
    deployment = casewise.fit(phantom_cardiac(), cases, labels, out=here / "deployment", views="light", learn=False)
    for number, folder in enumerate(("out", "more-out")):
        write_cohort(cardiac_cohort("B", 2, split=f"new{number}"), here / folder / "in")
        deployment.predict_folder(here / folder / "in" / "images", here / folder)
    said = ran("docs/how-to/monitor.md")
    assert [text.split(" (")[0] for text in said] == ["0 decisions", "2 decisions", "4 decisions"]


@pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")
def test_the_commands_about_benchmarks_run_as_printed_on_the_phantom(here: Path) -> None:
    hearts = cardiac_cohort("B", 11, split="evaluation")
    sides = {name: "calibration" if place < 6 else "evaluation" for place, name in enumerate(hearts.ids)}
    members = {name: replace(one, split=sides[name]) for name, one in hearts.members.items()}
    write_cohort(replace(hearts, members=members), here / "data")
    said = ran("docs/how-to/bench.md")
    assert "| M0 |" in said[0]
    assert (here / "out" / "tables" / "bench.tex").is_file()
    assert (here / "out" / "evaluation" / "report" / "report.html").is_file()


@pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")
def test_the_commands_about_masks_of_others_run_as_printed(here: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ["case,group"]
    for number in range(12):
        case_id = f"patient-{number:02d}"
        rows.append(f"{case_id},B")
        (here / "masks" / case_id).mkdir(parents=True)
        label = np.zeros((40, 40), np.uint8)
        label[10:30, 10:30] = 1
        for step in range(5):
            mask = label.copy()
            mask[: int(rng.integers(2, 9)) * step, :8] ^= 1
            np.save(here / "masks" / case_id / f"step_{step}.npy", mask)
        (here / "labels").mkdir(exist_ok=True)
        np.save(here / "labels" / f"{case_id}.npy", label)
    (here / "groups.csv").write_text("\n".join(rows))
    ran("docs/how-to/import-masks.md")
    assert len((here / "decisions.jsonl").read_text().splitlines()) == 12


@pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")
def test_the_commands_about_comparisons_run_as_printed_those_of_pipelines_too(here: Path) -> None:
    yaml = pytest.importorskip("yaml")
    update(here, cases=80, wrong=False)
    update(here / "holdout", cases=24, wrong=False)
    for name in ("old", "new", "labels"):
        (here / "holdout" / name).rename(here / f"holdout-{name}")
    (here / "holdout" / "cases.csv").rename(here / "patients.csv")
    for number in range(24):
        bitten = heart(8.0 + number % 2)
        bitten[2, 8 : 9 + number // 3, 22:27] = 0
        write(here / "holdout-new", f"h{number:02d}", bitten)
    (here / "images").mkdir()
    table = (here / "cases.csv").read_text().splitlines()
    phases = ["scan", *(("ED", "ES")[at % 2] for at in range(80))]
    (here / "cases.csv").write_text("\n".join(f"{row},{scan}" for row, scan in zip(table, phases, strict=True)))
    text = (ROOT / "docs/how-to/compare.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    (measures,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    (here / "measures.toml").write_text(measures)
    assert len(ran("docs/how-to/compare.md")) == 9
    assert (here / "taken" / "masks" / "h00.nii.gz").is_file()
    (pipeline,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL))
    compared = [line.removeprefix("casewise ") for line in pipeline["masks"]["script"] if line.startswith("casewise ")]
    for command in compared:
        outcome = CliRunner().invoke(app, shlex.split(command))
        assert outcome.exit_code == 0, outcome.output
    assert (here / pipeline["masks"]["artifacts"]["reports"]["junit"]).is_file()


def test_the_commands_about_plans_run_as_printed(here: Path) -> None:
    update(here, cases=80, wrong=False)
    assert len(ran("docs/how-to/plan.md")) == 3
    assert '"verdict": "accepted"' in (here / "out" / "summary.json").read_text()
