"""The two drawings of a certificate: what keeping more would cost, and the reliability diagram. Plain SVG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from casewise.judge.certificates.certificate import Certificate

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 260, 52, 40
_RIGHT = 0.4  # of the reliability diagram


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
