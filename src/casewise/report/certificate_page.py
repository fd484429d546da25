"""The certificate as a page that a clinician can read: one file, no network, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from casewise.judge.certificates.certificate import Certificate
from casewise.report.certificate_figures import curve_svg, reliability_svg

METHODS = {
    "crc": "conformal risk control (a bound in expectation)",
    "envelope": "conformal risk control on the per-case envelope (a bound in expectation)",
    "ltt": "learn-then-test (a bound with high probability)",
    "inflated": "inflated conformal risk control (experimental)",
}
NAMES = {
    "ha": "Harmful share of the accepted change (HA)",
    "harmed": "Cases made worse",
    "dice": "Accuracy lost (gains count 0)",
    "gain": "Accuracy change, mean",
    "surrogate": "Surrogate: harmful share of the un-gated edit",
    "kept": "Cases (or area) that keep the adaptation",
}
DETAILS = {
    "low": "Action of cases that changed little",
    "mid": "Action of cases that changed more",
    "action_pairs": "Pairs of actions that were searched",
    "low_mid": "Which action of a kept case counts (envelope: the worse of low and mid)",
    "within_cluster": "How several scans of one patient count",
    "excluded": "Labelled cases without a defined accuracy",
    "p_value": "Statistical test",
    "family_wise": "How choosing among cuts is paid for",
    "orders": "Fixed orders that the test averages over",
    "order_seed": "Seed of those orders",
    "alphas": "Promised risks",
    "population": "Cases that the promise is about",
    "inflation": "Price of choosing among thresholds",
    "stability_estimated_not_guaranteed": "Stability (estimated, not guaranteed)",
}


def certificate_page(certificate: Certificate) -> str:
    """One self-contained HTML page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
    )
    unit = "case" if certificate.units == certificate.cases else "patient"
    return environment.get_template("certificate.html").render(
        c=certificate,
        title="Harm certificate" if certificate.feasible else "Harm certificate: not issued",
        method=METHODS[certificate.method],
        unit=unit,
        numbers=_numbers(certificate),
        facts=_facts(certificate, unit),
        origin=_origin(certificate),
        exposures=[_exposure(one) for one in certificate.exposures],
        curve_svg=Markup(curve_svg(certificate)) if len(certificate.curve) > 1 else "",
        curve_caption=_curve_caption(certificate),
        reliability_svg=Markup(reliability_svg(certificate)) if certificate.reliability else "",
    )


def _numbers(certificate: Certificate) -> list[dict[str, str]]:
    before, after = certificate.deployed["before"], certificate.deployed["certified"]
    rows = []
    for name, words in NAMES.items():
        if name in before:
            unadapted = "–" if name == "kept" else _share(0.0, name)
            rows.append(
                {
                    "name": words,
                    "before": _share(before[name], name),
                    "after": _share(after[name], name),
                    "source": unadapted,
                }
            )
    return rows


def _facts(certificate: Certificate, unit: str) -> list[tuple[str, str]]:
    c = certificate
    bound = "none" if c.bound is None else f"{c.bound:.4f}"
    facts = [
        ("Population", c.population),
        (f"Labelled {unit}s (n)", f"{c.units}"),
        ("Promised risk (alpha)", f"{c.alpha:g}"),
        (
            "Chance that the promise fails (delta)",
            "none stated: the promise is an average" if c.delta is None else f"{c.delta:g}",
        ),
        (f"Smallest risk that {c.units} {unit}s can promise", f"{c.floor:.4f}"),
        ("Certified cut", _cut_words(c)),
        ("Bound reached" if c.delta is None else "p-value reached", bound),
        ("Share that keeps the adaptation", f"{c.kept:.0%}"),
    ]
    return [*facts, *((DETAILS.get(key, key.replace("_", " ")), str(value)) for key, value in c.details.items())]


def _cut_words(certificate: Certificate) -> str:
    if certificate.cut is None:
        return "none: every case is rolled back"
    if math.isinf(certificate.cut):
        return "no cut needed: even keeping everything is certified"
    return f"{certificate.cut:.6g}"


def _origin(certificate: Certificate) -> list[tuple[str, str]]:
    binding = certificate.binding
    bound = (
        []
        if binding is None
        else [(name, getattr(binding, name)) for name in ("model", "objective", "loader", "measure")]
    )
    return [
        *bound,
        ("certified policy", certificate.policy),
        ("policy before", certificate.policy_before),
        ("calibration archive", certificate.calibration_id),
    ]


def _exposure(entry: Mapping[str, Any]) -> str:
    parts = []
    for key, value in entry.items():
        many = isinstance(value, list | tuple) and len(value) > 3
        parts.append(f"{key}: {len(value)} of them" if many else f"{key}: {value}")
    return "; ".join(parts)


def _curve_caption(certificate: Certificate) -> str:
    if not certificate.feasible:
        return "Every possible cut, from keeping nothing (left) to keeping everything; none is certified."
    if certificate.delta is None:
        return "Every possible cut, from keeping nothing (left) to keeping everything; the ring is the certified one."
    return "Every possible cut, tested from left to right until the first p-value above delta; the ring is certified."


def _share(value: float, name: str) -> str:
    if name == "gain":
        return f"{value:+.4f}"
    return f"{value:.4f}" if name in ("dice", "ha", "surrogate") else f"{value:.1%}"
