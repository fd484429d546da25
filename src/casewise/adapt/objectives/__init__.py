"""Registry of objectives. To add one, write a file and a line in ``OBJECTIVES``.

Your own objective needs no line here: pass the object, or its address ``package.module:Name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from casewise.adapt.objective import Objective, as_objective, required_arguments
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.deyo import Deyo
from casewise.adapt.objectives.eata import Eata, EataFisher
from casewise.adapt.objectives.grata import Grata
from casewise.adapt.objectives.memo import Memo
from casewise.adapt.objectives.sar import Sar
from casewise.adapt.objectives.tent import Tent
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
    },
)
"""One class per method. Without options, the class is the variant that the paper uses."""

FORMS: Registry[Callable[..., Objective]] = Registry(
    "form of an objective",
    {
        "memo-published": Memo.published,
        "cotta-published": Cotta.published,
        "sar-published": Sar.published,
        "deyo-published": Deyo.published,
        "grata-shared": Grata.shared,
        "grata-official": Grata.official,
    },
)
"""Other variants of the same methods, as in the published code of the authors; for EATA this is ``eata-fisher``."""


def objective_of(spec: Any, **options: Any) -> Objective:
    """Return an objective from a name ("tent"), an address ("package.module:Name"), its class or itself."""
    if isinstance(spec, str) and ":" not in spec:
        known: Registry[Callable[..., Objective]] = Registry("objective", {**OBJECTIVES, **FORMS})
        built: Objective = known.build(spec, **options)
        return built
    found = from_address(spec, "objective") if isinstance(spec, str) else spec
    is_class = inspect.isclass(found)
    if not is_class and not inspect.isfunction(found):
        return as_objective(found)
    needs = required_arguments(found)
    on_network = hasattr(found, "reset") and not hasattr(found, "begin")  # built for each case, from the network
    if is_class and len(needs) > on_network:
        raise BadInput(
            f"{found.__qualname__} cannot be built: it needs {', '.join(needs)}; give its arguments defaults, or write "
            "a function of the network that returns the object"
        )
    return as_objective(found if needs else found(**options))


def check_named_in_file(name: object, *, typed: str | None, where: str) -> None:
    """Refuse an objective that a file names by address, unless the person who runs casewise typed the same address.

    Importing an address runs code, so a file may name registered objectives only.
    """
    if not isinstance(name, str):
        raise BadInput(f"{where}: the objective must be a name, got {type(name).__name__}; record it again")
    if name in OBJECTIVES or name in FORMS or (":" in name and name == typed):
        return
    kind, _, rest = name.partition(":")
    if (
        kind in ("views", "running", "tuned", "tuned+views") and ":" not in rest
    ):  # names of views and sets; an address has a colon
        return
    if name == "members:folds":  # other members are files that the user must name
        return
    if ":" in name:
        raise UnsafeInput(
            f"{where} names the objective {name[:100]!r}, which is code to import; if you trust it, add "
            f"--set objective={name[:100]}"
        )
    objective_of(name)  # raises UnknownName with a suggestion
