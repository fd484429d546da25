"""The list of objectives: adding one is a file and a line.

An objective of your own needs no registration: pass the object, or its address ``package.module:Name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from casewise.adapt.objective import Objective, as_objective
from casewise.adapt.objectives.consensus import Consensus, DgTta
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.deyo import Deyo
from casewise.adapt.objectives.eata import Eata, EataFisher
from casewise.adapt.objectives.foa import Foa
from casewise.adapt.objectives.grata import Grata
from casewise.adapt.objectives.memo import Memo
from casewise.adapt.objectives.sar import Sar
from casewise.adapt.objectives.tent import BnStats, Tent, Vptta
from casewise.adapt.objectives.ttt import Ttt
from casewise.core.errors import BadInput, UnsafeInput
from casewise.core.registry import Registry, from_address

OBJECTIVES: Registry[type] = Registry(
    "objective",
    {
        "tent": Tent,
        "eata": Eata,
        "eata-fisher": EataFisher,
        "memo": Memo,
        "cotta": Cotta,
        "sar": Sar,
        "grata": Grata,
        "deyo": Deyo,
        "bn-stats": BnStats,
        "foa": Foa,
        "ttt": Ttt,
        "consensus": Consensus,
        "dg-tta": DgTta,
        "vptta": Vptta,
    },
)
"""One class per method; built without options it is the paper's variant."""

FORMS: Registry[Callable[..., Objective]] = Registry(
    "form of an objective",
    {
        "memo-published": Memo.published,
        "cotta-published": Cotta.published,
        "sar-published": Sar.published,
        "deyo-published": Deyo.published,
        "grata-shared": Grata.shared,
        "grata-official": Grata.official,
        "dg-tta-photos": DgTta.for_photos,
    },
)
"""Other forms of the same methods: those that others released (EATA's has a class of its own, ``eata-fisher``), and
DG-TTA with the views of photographs."""


def objective_of(spec: Any, **options: Any) -> Objective:
    """An objective from a name ("tent"), an address ("package.module:Name"), or an object that is one already."""
    if not isinstance(spec, str):
        return as_objective(spec)
    if ":" not in spec:
        known: Registry[Callable[..., Objective]] = Registry("objective", {**OBJECTIVES, **FORMS})
        built: Objective = known.build(spec, **options)
        return built
    found = from_address(spec, "objective")
    return as_objective(found(**options) if inspect.isclass(found) or inspect.isfunction(found) else found)


def check_named_in_file(name: object, *, typed: str | None, where: str) -> None:
    """Refuse an objective that a file names by address, unless the person who runs casewise typed the same address.

    An address is code to import; a file from a stranger may name registered objectives only.
    """
    if not isinstance(name, str):
        raise BadInput(f"{where} names an objective with a text, got {type(name).__name__}; record it again")
    if name in OBJECTIVES or name in FORMS or (":" in name and name == typed):
        return
    kind, _, rest = name.partition(":")
    if kind in ("views", "running") and ":" not in rest:  # sets and views by name; an address would have one
        return
    if name == "members:folds":  # other members are files of somebody's choice
        return
    if ":" in name:
        raise UnsafeInput(
            f"{where} names the objective {name[:100]!r}, which is code of its own; if you know it and would run it, "
            f"type the same: --objective {name[:100]}"
        )
    objective_of(name)  # raises UnknownName, which says what was probably meant
