"""The certificate as a page that a clinician can read: one file, no network, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from casewise.core.brief import UNIT, counted
from casewise.judge.certificates.certificate import Certificate, unit_of

METHODS = {
    "crc": "conformal risk control (a bound in expectation)",
    "envelope": "conformal risk control on the per-case envelope (a bound in expectation)",
    "ltt": "learn-then-test (a bound with high probability)",
    "inflated": "inflated conformal risk control (experimental)",
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
    "kept": "Cases (or area) that keep the adaptation",
}
DETAILS = {
    "low": "Action of cases that changed little",
    "mid": "Action of cases that changed more",
    "action_pairs": "Pairs of actions that were searched",
    "low_mid": "Which action of a kept case counts (envelope: the worse of low and mid)",
    "within_cluster": f"How several cases of one {UNIT[0]} count",
    "margin": "Loss of accuracy up to which a case does not count as made worse",
    "p_value": "Statistical test",
    "family_wise": "How choosing among cuts is paid for",
    "orders": "Fixed orders that the test averages over",
    "order_seed": "Seed of those orders",
    "alphas": "Promised risks",
    "population": "Cases that the promise is about",
    "inflation": "Price of choosing among thresholds",
    "stability_estimated_not_guaranteed": "Stability (estimated, not guaranteed)",
}

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 260, 52, 40
_RIGHT = 0.4  # of the reliability diagram


def certificate_page(certificate: Certificate) -> str:
    """One self-contained HTML page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
    )
    unit = unit_of(certificate.cases, certificate.units)
    return environment.get_template("certificate.html").render(
        c=certificate,
        counted=counted,
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
    """What stands beside the picture: for whom the promise is, and for whom it is not."""
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
        "another model, other weights, views or rates",
        f"the calibration cases themselves and others of their {UNIT[1]}",
        "one single case: it is an average",
    ]
    return {"inside": inside, "outside": outside}


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most].rsplit(', ', 1)[0]}, ... (below)"


def _grid_svg(certificate: Certificate) -> str:
    """A hundred cases as squares: kept, of which so many may be hurt; and back to M0, where nothing can be lost."""
    c = certificate
    kept = round(100 * c.kept) if c.feasible else 0
    hurt = min(kept, round(100 * c.alpha)) if c.feasible and c.loss == "harmed" else 0
    size, gap, parts = 15, 3, []
    for at in range(100):
        color = "var(--bad)" if at < hurt else "var(--good)" if at < kept else "var(--faint)"
        x, y = (at % 10) * (size + gap), (at // 10) * (size + gap)
        parts.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="2" fill="{color}"/>')
    side = 10 * (size + gap) - gap
    title = f"of 100 cases {kept} keep the new mask, {100 - kept} go back to M0"
    return f'<svg viewBox="0 0 {side} {side}" width="{side}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _numbers(certificate: Certificate) -> list[dict[str, str]]:
    before, after = certificate.deployed["before"], certificate.deployed["certified"]
    rows = []
    for name, words in NAMES.items():
        if name in before:
            unadapted = "–" if name in ("kept", "judged") else _share(0.0, name)
            rows.append(
                {
                    "name": words,
                    "before": _share(before[name], name),
                    "after": _share(after[name], name) if name in after else "–",
                    "source": unadapted,
                }
            )
    return rows


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
        ("Share that keeps the adaptation", f"{c.kept:.0%}"),
    ]
    told = {key: value for key, value in c.details.items() if key != "batch_inputs"}  # hashes, for programs
    return [*facts, *((DETAILS.get(key, key.replace("_", " ")), _listed(value)) for key, value in told.items())]


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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


def curve_svg(certificate: Certificate) -> str:
    """Bound (or p-value) against kept share at every jump point, with the promised level and the chosen point."""
    level = certificate.alpha if certificate.delta is None else certificate.delta
    points = [(row["kept"], min(row["bound"], 1.0)) for row in certificate.curve]
    top = min(1.0, max(level * 1.5, *(y for _, y in points)) * 1.05)
    label = "bound" if certificate.delta is None else "p-value"
    parts = _axes("share that keeps the adaptation", label, top)
    parts.append(_line([(0, level), (1, level)], top, "var(--bad)", dash="5 4"))
    parts.append(
        _text(_x(0.01), _y(level, top) - 6, f"{'alpha' if certificate.delta is None else 'delta'} = {level:g}")
    )
    steps = [step for (x0, y0), (x1, _) in pairwise(points) for step in ((x0, y0), (x1, y0))]
    parts.append(_line([*steps, points[-1]], top, "var(--ink)"))
    parts += [_dot(x, y, top, "var(--good)" if y <= level + 1e-12 else "var(--bad)", 3) for x, y in points]
    chosen = [row for row in certificate.curve if row["setting"] == certificate.cut]
    parts += [_dot(row["kept"], min(row["bound"], 1.0), top, "var(--good)", 7, hollow=True) for row in chosen]
    return _svg(parts, f"{label} against the share of cases that keep the adaptation")


def reliability_svg(certificate: Certificate) -> str:
    """Promised alpha against the risk that was found; the safe half-plane is shaded (L10)."""
    top = max(_RIGHT, *(max(p["risk"], p["deployed"]) * 1.1 for p in certificate.reliability))
    parts = _axes("promised risk (alpha)", "risk found", top, right=_RIGHT)
    corner = [(0.0, 0.0), (min(top, _RIGHT), min(top, _RIGHT)), (_RIGHT, min(top, _RIGHT)), (_RIGHT, 0.0)]
    spots = " ".join(f"{_x(x, _RIGHT):.1f},{_y(y, top):.1f}" for x, y in corner)
    parts.insert(0, f'<polygon points="{spots}" fill="var(--soft)"/>')
    parts.append(_line([(0, 0), (min(top, _RIGHT),) * 2], top, "var(--muted)", right=_RIGHT, dash="4 3"))
    for name, color, hollow in (("risk", "var(--good)", False), ("deployed", "var(--bad)", True)):
        spots_of = [(p["alpha"], p[name]) for p in certificate.reliability]
        parts.append(_line(spots_of, top, color, right=_RIGHT))
        parts += [_dot(x, y, top, color, 4.5, hollow=hollow, right=_RIGHT) for x, y in spots_of]
    parts.append(_text(_x(0.02, _RIGHT), 22, "● certified quantity", color="var(--good)"))
    parts.append(_text(_x(0.02, _RIGHT), 40, "○ really deployed", color="var(--bad)"))
    return _svg(parts, "promised risk against the risk that was found")


def _x(value: float, right: float = 1.0) -> float:
    return _LEFT + value / right * (_WIDTH - _LEFT - 16)


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - min(value / top, 1.0) * (_HEIGHT - _BOTTOM - 12)


def _axes(across: str, up: str, top: float, right: float = 1.0) -> list[str]:
    parts = [
        f'<path d="M{_LEFT} 12V{_HEIGHT - _BOTTOM}H{_WIDTH - 16}" fill="none" stroke="var(--muted)"/>',
        _text((_LEFT + _WIDTH) / 2, _HEIGHT - 4, across, "middle"),
        f'<text class="m" transform="translate(13 {_HEIGHT / 2 - 8}) rotate(-90)" text-anchor="middle">{up}</text>',
    ]
    for k in range(5):
        parts.append(
            _text(_x(right * k / 4, right), _HEIGHT - _BOTTOM + 16, f"{right * k / 4:.2g}", "middle", "var(--muted)")
        )
        parts.append(_text(_LEFT - 6, _y(top * k / 4, top) + 4, f"{top * k / 4:.2f}", "end", "var(--muted)"))
    return parts


def _line(points: Sequence[tuple[float, float]], top: float, color: str, *, right: float = 1.0, dash: str = "") -> str:
    spots = " ".join(f"{_x(x, right):.1f},{_y(y, top):.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{spots}" fill="none" stroke="{color}" stroke-width="1.6"{dashed}/>'


def _dot(x: float, y: float, top: float, color: str, radius: float, *, hollow: bool = False, right: float = 1.0) -> str:
    look = f'fill="var(--paper)" fill-opacity=".01" stroke="{color}" stroke-width="2"' if hollow else f'fill="{color}"'
    return f'<circle cx="{_x(x, right):.1f}" cy="{_y(y, top):.1f}" r="{radius}" {look}/>'


def _text(x: float, y: float, words: str, anchor: str = "start", color: str = "var(--ink)") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{color}">{words}</text>'


def _svg(parts: list[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    )
