"""The certificate as a page that a clinician can read: one file, no network, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from casewise.core.text import UNIT
from casewise.judge.certificates.certificate import Certificate, unit_of
from casewise.render.ink import HARM, INK, OURS, canvas, draw_reliability, inked, page_svg, svg_text
from casewise.report.page import render_page

METHODS = {
    "crc": "conformal risk control (a bound in expectation)",
    "envelope": "conformal risk control on the per-case envelope (a bound in expectation)",
    "ltt": "learn-then-test (a bound with high probability)",
    "selection": "conformal selection (a bound in expectation, for this batch)",
}
NAMES = {
    "ha": "Harmful share of the accepted change (HA)",
    "harmed": "Cases made worse",
    "dice": "Accuracy lost (gains count 0)",
    "worse-voxels": "Share of the changed voxels that became wrong",
    "judged": "Share of the change that HA judged",
    "gain": "Accuracy change, mean",
    "surrogate": "Surrogate: harmful share of the un-gated edit",
    "kept": "Cases (or area) that keep the new mask",
}
DETAILS = {
    "low": "Action of cases that changed little",
    "mid": "Action of cases that changed more",
    "action_pairs": "Pairs of actions that were compared",
    "low_mid": "Action that counts for a kept case (envelope: the worse of low and mid)",
    "within_cluster": f"Combination of several cases of one {UNIT[0]}",
    "margin": "Loss of accuracy up to which a case does not count as made worse",
    "p_value": "Statistical test",
    "family_wise": "Correction for the choice among cuts",
    "orders": "Number of fixed orders that the test averages over",
    "order_seed": "Seed of those orders",
    "alphas": "Promised risks",
    "population": "Cases that the promise covers",
    "stability_estimated_not_guaranteed": "Stability (estimated, not guaranteed)",
}


def certificate_page(certificate: Certificate) -> str:
    """One self-contained HTML page."""
    unit = unit_of(certificate.cases, certificate.units)
    return render_page(
        "certificate.html.j2",
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
        grid_svg=Markup(_grid_svg(certificate)),
        coverage=_coverage(certificate, unit),
    )


def _coverage(certificate: Certificate, unit: str) -> dict[str, list[str]]:
    """Return the text beside the picture: for whom the promise is, and for whom it is not."""
    c = certificate
    sites = ", ".join(c.groups)
    model = "" if c.binding is None else f"model {c.binding.model[:12]}, {_shortened(c.binding.objective)}"
    inside = [
        f"new {unit} like the {c.units} of cohort {c.cohort}" if c.cohort else f"new {unit} like the {c.units} used",
        f"from {sites}" if sites else "from the same site, scanner and protocol",
        f"segmented with {model}" if model else "segmented with the same model",
        f"under policy {c.policy_name}, as it was certified",
    ]
    outside = [
        f"any other site or scanner than {sites}" if sites else "another site, scanner or protocol",
        "another model, or other weights, views or learning rates",
        f"the calibration cases themselves and others of their {UNIT[1]}",
        "a single case: the promise is an average",
    ]
    return {"inside": inside, "outside": outside}


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most].rsplit(', ', 1)[0]}, ... (below)"


def _grid_svg(certificate: Certificate) -> str:
    """Draw a hundred squares: kept cases, those among them that may be hurt, and cases that keep M0."""
    c = certificate
    kept = round(100 * c.kept) if c.feasible else 0
    hurt = min(kept, round(100 * c.alpha)) if c.feasible and c.loss == "harmed" else 0
    size, gap, parts = 15, 3, []
    for at in range(100):
        color = "var(--harm)" if at < hurt else "var(--ours)" if at < kept else "var(--faint)"
        x, y = (at % 10) * (size + gap), (at // 10) * (size + gap)
        parts.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="2" fill="{color}"/>')
    side = 10 * (size + gap) - gap
    title = f"of 100 cases {kept} keep the new mask, {100 - kept} go back to M0"
    return f'<svg viewBox="0 0 {side} {side}" width="{side}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _numbers(certificate: Certificate) -> list[dict[str, str]]:
    before, after = certificate.deployed["before"], certificate.deployed["certified"]
    return [
        {
            "name": words,
            "before": _share(before[name], name),
            "after": _share(after[name], name) if name in after else "–",
            "source": "–" if name in ("kept", "judged") else _share(0.0, name),
        }
        for name, words in NAMES.items()
        if name in before
    ]


def _facts(certificate: Certificate, unit: str) -> list[tuple[str, str]]:
    c = certificate
    bound = "none" if c.bound is None else f"{c.bound:.4f}"
    facts = [
        ("Population", c.population),
        (f"Labelled {unit} (n)", f"{c.units}"),
        ("Promised risk (alpha)", f"{c.alpha:g}"),
        (
            "Chance that the promise fails (delta)",
            "none stated: the promise is an average" if c.delta is None else f"{c.delta:g}",
        ),
        (f"Smallest risk that {c.units} {unit} can promise", f"{c.floor:.4f}"),
        ("Certified cut", _cut_words(c)),
        ("Bound reached" if c.delta is None else "p-value reached", bound),
        ("Share that keeps the new mask", f"{c.kept:.0%}"),
    ]
    told = {key: value for key, value in c.details.items() if key != "batch_inputs"}  # hashes, for programs
    return [*facts, *((DETAILS.get(key, key.replace("_", " ")), _listed(value)) for key, value in told.items())]


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _cut_words(certificate: Certificate) -> str:
    if certificate.cut is None:
        return "none: every case is rolled back"
    if math.isinf(certificate.cut):
        return "none: even keeping every new mask is certified"
    return f"{certificate.cut:.6g}"


def _origin(certificate: Certificate) -> list[tuple[str, str]]:
    binding = certificate.binding
    bound = [] if binding is None else [(name, str(value)) for name, value in binding.facts.items()]
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


def curve_svg(certificate: Certificate) -> str:
    """Draw bound (or p-value) against kept share at every jump point, with the promised level and the chosen point."""
    level, name = (certificate.alpha, "alpha") if certificate.delta is None else (certificate.delta, "delta")
    label = "bound" if certificate.delta is None else "p-value"
    kept = [row["kept"] for row in certificate.curve]
    bounds = [min(row["bound"], 1.0) for row in certificate.curve]
    with inked():
        figure, axes = canvas(5.4, 3.0)
        axis = axes[0, 0]
        axis.axhline(level, color=HARM, linestyle="--", linewidth=1.2)
        axis.annotate(f"{name} = {level:g}", (0.01, level), xytext=(0, 3), textcoords="offset points", fontsize=8.5)
        axis.step(kept, bounds, where="post", color=INK, linewidth=1.4)
        axis.scatter(kept, bounds, s=12, color=[OURS if y <= level + 1e-12 else HARM for y in bounds], zorder=3)
        for row in certificate.curve:
            if row["setting"] == certificate.cut:
                axis.plot(row["kept"], min(row["bound"], 1.0), "o", color=OURS, markersize=11, markerfacecolor="none")
        axis.set_xlabel("share that keeps the new mask")
        axis.set_ylabel(label)
    return page_svg(svg_text(figure, id="curve"), title=f"{label} against the share of cases that keep the new mask")


def reliability_svg(certificate: Certificate) -> str:
    """Draw the promised alpha against the risk that was found; the safe side is shaded (L10)."""
    names = {"risk": "certified quantity", "deployed": "really deployed"}
    found = {name: [one[key] for one in certificate.reliability] for key, name in names.items()}
    figure = draw_reliability([one["alpha"] for one in certificate.reliability], found)
    return page_svg(svg_text(figure, id="reliability"), title="promised risk against observed risk")
