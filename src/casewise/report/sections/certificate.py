"""What was promised with a guarantee, in the words of its certificate (L, S1)."""

from __future__ import annotations

import pandas as pd

from casewise.judge.certificates.certificate import Certificate
from casewise.render.cells import Cell, NotRun
from casewise.render.tables import Column, Table, table
from casewise.report.figures.reliability import draw_reliability
from casewise.report.material import Material
from casewise.report.section import Picture, Section

_NUMBERS = (
    "kind",
    "loss",
    "method",
    "alpha",
    "delta",
    "population",
    "units",
    "cases",
    "floor",
    "needed",
    "cut",
    "bound",
    "kept",
)


def certificate(material: Material) -> Section:
    """The statement and the numbers of certificate.json, and the reliability diagram where it has one (fig:crc)."""
    found = material.extras.certificate
    if found is None:
        reason = "needs certificate.json beside the calibration archive; casewise certify writes it"
        return Section("certificate", "Certificate", missing={"certificate and reliability diagram (fig:crc)": reason})
    curve = pd.DataFrame(found.reliability)
    drawn = not curve.empty and {"alpha", "risk"} <= set(curve.columns)
    missing = {} if drawn else {"reliability diagram (fig:crc)": "the certificate holds no risks at several levels"}
    notes = tuple(f"It is void if {reason}." for reason in found.invalid_if)
    pictures = (_picture(found, curve),) if drawn else ()
    return Section("certificate", "Certificate", _lead(found), (_table(found),), pictures, (), notes, missing)


def _lead(found: Certificate) -> str:
    if found.feasible:
        return found.statement
    return f"Nothing is certified, so M0 would always be deployed. {found.advice}"


def _table(found: Certificate) -> Table:
    columns = (Column("name", "Quantity", text=True), Column("value", "Value", 4, text=True))
    rows: list[dict[str, Cell]] = [{"name": name, "value": _value(found, name)} for name in _NUMBERS]
    for policy, numbers in found.deployed.items():
        rows += [{"name": f"{policy}: {name}", "value": value} for name, value in numbers.items()]
    caption = f"Policy {found.policy_name}, calibration {found.calibration_id[:12]}. {found.advice}"
    return table("certificate", "Its numbers", columns, rows, caption=caption, collapsed=True)


def _value(found: Certificate, name: str) -> Cell:
    value: Cell = getattr(found, name)
    return NotRun("there is none") if value is None else value


def _picture(found: Certificate, curve: pd.DataFrame) -> Picture:
    caption = (
        f"Promised risk against risk ({found.reliability_from or 'origin not said'}); below the diagonal it held. "
        "that this many cases cannot certify are left out."
    )
    figure = draw_reliability({found.policy_name or "policy": curve[["alpha", "risk"]].dropna()})
    return Picture("crc", "Reliability diagram", figure, caption, "fig:crc")
