"""The software bill of materials of the wheel: CycloneDX JSON, made without a network and put into .dist-info/sboms.

Versions are the pins of constraints.txt, which are the ones that the tests ran with. The scope of a component is
``required`` (a dependency of casewise), ``optional`` (needed by an extra, or by another component) or ``excluded``
(used for tests or documentation only). ``python packaging/sbom.py`` prints the document.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
TOOLS = ("dev", "docs")  # extras that no user installs


def normalized(name: str) -> str:
    """Return the name of a package as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    """Return the packages that a list of requirements names, casewise itself left out."""
    found = {normalized(re.split(r"[\s\[<>=!~;]", one, maxsplit=1)[0]) for one in requirements}
    return found - {"casewise"}


def pins(constraints: str) -> dict[str, str]:
    """Return name -> version of the lines of a constraints file."""
    rows = re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE)
    return {normalized(name): version for name, version in rows}


def bill_of_materials(root: Path = ROOT) -> dict[str, Any]:
    """Return the CycloneDX document of the project in ``root``."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.search(r'^__version__ = "(.+)"$', (root / "src/casewise/__init__.py").read_text(), re.MULTILINE)
    if version is None:
        raise SystemExit("src/casewise/__init__.py states no __version__")
    extras = project["optional-dependencies"]
    required = names(project["dependencies"])
    optional = set().union(*(names(found) for extra, found in extras.items() if extra not in TOOLS))
    tools = set().union(*(names(extras[extra]) for extra in TOOLS)) - required - optional
    versions = pins((root / "constraints.txt").read_text(encoding="utf-8"))

    def component(name: str) -> dict[str, Any]:
        found = versions.get(name)
        scope = "required" if name in required else "excluded" if name in tools else "optional"
        purl = f"pkg:pypi/{name}@{found}" if found else f"pkg:pypi/{name}"
        made = {"type": "library", "bom-ref": purl, "name": name, "scope": scope, "purl": purl}
        return made | ({"version": found} if found else {})

    components = [component(name) for name in sorted({*versions, *required, *optional, *tools})]
    own = f"pkg:pypi/casewise@{version[1]}"
    direct = [one["bom-ref"] for one in components if one["name"] in required]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": "casewise",
                "version": version[1],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": direct}],
        "compositions": [{"aggregate": "incomplete", "assemblies": [own]}],
    }
    seed = json.dumps(document, sort_keys=True)
    return {**document, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, seed)}"}


class BillOfMaterials(BuildHookInterface[Any]):
    """Build hook that puts the document into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the document and name it to the builder."""
        if self.target_name != "wheel":
            return
        file = Path(self.root, "build", "sbom", "casewise.cdx.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(bill_of_materials(Path(self.root)), indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(file.relative_to(self.root)))


if __name__ == "__main__":
    print(json.dumps(bill_of_materials(), indent=1))
