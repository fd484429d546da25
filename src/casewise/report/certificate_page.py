"""The certificate as a page that a clinician can read: one file, no network, no script."""

from __future__ import annotations

from markupsafe import Markup

from casewise.core.text import UNIT
from casewise.judge.certificates.certificate import Certificate, unit_of
from casewise.render.ink import HARM, INK, OURS, canvas, draw_reliability, inked, page_svg, svg_text
from casewise.report.page import render_page


def certificate_page(certificate: Certificate) -> str:
    """One self-contained HTML page."""
    unit = unit_of(certificate.cases, certificate.units)
    return render_page(
        "certificate.html.j2", c=certificate,
        title="Harm certificate" if certificate.feasible else "Harm certificate: not issued", unit=unit,
        numbers=_numbers(certificate), curve_svg=Markup(curve_svg(certificate)) if len(certificate.curve) > 1 else "",
        reliability_svg=Markup(reliability_svg(certificate)) if certificate.reliability else "",
        grid_svg=Markup(_grid_svg(certificate)), unit_words=UNIT,
    )  # fmt: skip


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


def _numbers(certificate: Certificate) -> dict[str, tuple[str, str, str]]:
    """Every quantity as calibrated, as certified and of M0, in the words of the page."""
    before, after = certificate.deployed["before"], certificate.deployed["certified"]
    found = {}
    for name, value in before.items():
        certified = _share(after[name], name) if name in after else "–"
        found[name] = _share(value, name), certified, "–" if name in ("kept", "judged") else _share(0.0, name)
    return found


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
