"""``--preset NAME``: options that belong together, so that nobody has to know them all before the first run.

What the command line or casewise.toml says wins over a preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from casewise.core.registry import Registry

if TYPE_CHECKING:
    from casewise.data.folders import CaseFiles

PRESETS: Registry[Mapping[str, Any]] = Registry(
    "preset",
    {
        "driving": {  # SegFormer's encoder has LayerNorm only; a street has no background; frames of a drive are alike
            "objective": "tent",
            "learning_rate": 1e-4,
            "parameters": "encoder-norm",
            "steps": 8,
            "foreground": False,
            "metric": "miou",
            "shrink": "",
        },
    },
)
SMALLEST_REGION = 200  # pixels of a frame of 1080 x 1920, as in the paper
FRAME = 1080 * 1920
_FRAME_NUMBER = re.compile(r"(?:_frame)?_\d+$")
_ENDINGS = ("_leftImg8bit", "_rgb_anon", "_rgb_ref_anon")


def apply_preset(ctx: typer.Context, name: str | None) -> str | None:
    """The values of a preset become the defaults of the command that takes them."""
    if name is not None and not ctx.resilient_parsing:
        taken = {parameter.name for parameter in ctx.command.params}
        values = {key: value for key, value in PRESETS[name].items() if key in taken}
        ctx.default_map = {**values, **(ctx.default_map or {})}
    return name


def driving_cases(cases: Sequence[CaseFiles], asked: Mapping[str, Any]) -> tuple[tuple[CaseFiles, ...], dict[str, Any]]:
    """Frames with their drive as the cluster, and the smallest region that counts by the size of the first frame."""
    placed = tuple(one if one.cluster else replace(one, cluster=sequence_of(one.id)) for one in cases)
    if "min_area" in asked:
        return placed, dict(asked)
    from casewise.data.headers import grid_of

    rows, columns = grid_of(cases[0].images[0]).shape[:2]
    return placed, {**asked, "min_area": max(1, round(SMALLEST_REGION * rows * columns / FRAME))}


def sequence_of(case_id: str) -> str:
    """The drive that a frame belongs to, from its name; the name itself where it holds no frame number.

    >>> sequence_of("GOPR0122_frame_000161_rgb_anon"), sequence_of("aachen_000000_000019_leftImg8bit")
    ('GOPR0122', 'aachen_000000')
    """
    for ending in _ENDINGS:
        case_id = case_id.removesuffix(ending)
    return _FRAME_NUMBER.sub("", case_id) or case_id
