"""An archive or a policy from a stranger: it names what is registered, and nothing that it names is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from casewise.adapt.networks import phantom_cardiac
from casewise.adapt.objectives import check_named_in_file, objective_of
from casewise.archive.store import create_archive
from casewise.core.errors import BadInput, UnknownName, UnsafeInput
from casewise.core.records import Binding, Policy
from casewise.judge.policy import write_policy

MODEL = "casewise.adapt.networks:phantom_cardiac"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with an archive in it that brings code of its own, which leaves a proof when it runs."""
    binding = Binding(phantom_cardiac().fingerprint, "x", "y", "z")
    configuration = {"adaptation": {"objective": "archive.evil:Evil", "steps": 1}}
    create_archive(tmp_path / "archive", binding=binding, steps=1, configuration=configuration)
    how = configuration["adaptation"]
    write_policy(tmp_path / "archive", Policy("fixed-k", "fixed-k", {"step": 1}, 1, adaptation=how))
    (tmp_path / "archive" / "evil.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'proof')!r})\n")
    (tmp_path / "images").mkdir()
    return tmp_path


def typed(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "casewise", "predict", "-i", "images", "-o", "out", "-m", MODEL, *words]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)


def test_an_archive_as_policy_imports_nothing_that_its_manifest_names(here: Path) -> None:
    done = typed(here, "--policy", "archive")
    assert done.returncode == 2
    assert "add --set objective=archive.evil:Evil" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (here / "proof").exists()


def test_the_working_directory_is_not_importable_by_accident(here: Path) -> None:
    for name in ("scipy", "torch", "typer", "nibabel", "yaml", "wandb", "mlflow"):
        (here / f"{name}.py").write_text(f"import os\nos.makedirs({str(here / 'proof')!r}, exist_ok=True)\n")
    done = typed(here, "--policy", "m0")
    assert done.returncode == 2
    assert "no cases" in done.stderr or "no image" in done.stderr
    assert not (here / "proof").exists()


def test_an_address_that_was_typed_is_found_in_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typed_by_me.py").write_text("from casewise.adapt.objectives.tent import Tent as Mine\n")
    before = list(sys.path)
    assert type(objective_of("typed_by_me:Mine")).__name__ == "Tent"
    assert sys.path == [*before, os.getcwd()]  # at the end, so that it replaces no installed package
    sys.path.remove(os.getcwd())
    sys.modules.pop("typed_by_me")
    with pytest.raises(BadInput, match="no objective at 'nowhere:Name'"):
        objective_of("nowhere:Name")
    assert sys.path == before


def test_a_file_names_registered_objectives_or_what_was_typed() -> None:
    check_named_in_file("tent", typed=None, where="the archive")
    check_named_in_file("mine:Own", typed="mine:Own", where="the archive")
    with pytest.raises(UnsafeInput, match=r"the archive names the objective 'mine:Own', which is code to import"):
        check_named_in_file("mine:Own", typed="mine:Other", where="the archive")
    with pytest.raises(UnknownName, match="Did you mean 'tent'"):
        check_named_in_file("tnt", typed=None, where="the archive")
    with pytest.raises(BadInput, match="got list"):
        check_named_in_file(["tent"], typed=None, where="the archive")


def test_a_policy_names_a_registered_controller(here: Path) -> None:
    file = here / "archive" / "policy.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps({**plain, "controller": "archive.evil:Evil"}))
    done = typed(here, "--policy", str(file))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (here / "proof").exists()
