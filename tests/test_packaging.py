"""What is shipped: one version everywhere, and a wheel that holds more than its Python files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import casewise

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere() -> None:
    for name in ("CITATION.cff", "packaging/conda/recipe.yaml"):
        found = re.search(r'^\s*version: "?([\d.]+)"?$', (ROOT / name).read_text(), re.MULTILINE)
        assert found, name
        assert found[1] == casewise.__version__, name


def test_the_conda_recipe_needs_what_the_wheel_needs() -> None:
    table = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    wanted = dict(re.findall(r'"([a-z0-9-]+)(>=[\d.]+)', table))
    recipe = (ROOT / "packaging/conda/recipe.yaml").read_text().split("  run:\n")[1].split("  run_constraints:")[0]
    held = dict(re.findall(r"- ([a-z0-9-]+) (>=[\d.]+)", recipe))
    held["matplotlib"] = held.pop("matplotlib-base")
    held.pop("python")
    assert held == wanted


def test_every_public_name_stands_in_the_api_reference() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    missing = [name for name in casewise.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", page)]
    assert set(missing) <= {"BadInput", "CasewiseError"}, missing  # which stand in the list of errors


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    program = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_has_a_bill_of_materials_with_the_pinned_versions(wheel: Path) -> None:
    folder = f"casewise-{casewise.__version__}.dist-info/sboms/"
    (name,) = (one for one in zipfile.ZipFile(wheel).namelist() if one.startswith(folder))
    bill = json.loads(zipfile.ZipFile(wheel).read(name))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == casewise.__version__
    listed = {one["name"]: one for one in bill["components"]}
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {name.lower().replace("_", "-"): version for name, version in pinned}.items() <= {
        name: one.get("version") for name, one in listed.items()
    }.items()
    scopes = {name: listed[name]["scope"] for name in ("numpy", "torch", "pytest")}
    assert scopes == {"numpy": "required", "torch": "optional", "pytest": "excluded"}
    (own,) = bill["dependencies"]
    assert listed["numpy"]["bom-ref"] in own["dependsOn"]
    assert listed["torch"]["bom-ref"] not in own["dependsOn"]
    assert len({one["bom-ref"] for one in bill["components"]}) == len(bill["components"])


def test_the_wheel_holds_types_templates_weights_and_codes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    here = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "casewise").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    assert here <= names, sorted(here - names)[:5]
    assert "casewise/py.typed" in names
    metadata = zipfile.ZipFile(wheel).read(f"casewise-{casewise.__version__}.dist-info/METADATA").decode()
    assert "Provides-Extra: dicom" in metadata
    assert not re.search(r"^Requires-Dist: torch\b(?!.*extra)", metadata, re.MULTILINE)
