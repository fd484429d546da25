"""Views: predictions of the frozen network for transformed inputs (no label, no training).

A view transforms the prepared inputs (after the preprocessing of the backbone) and, if it moves voxels, maps the
logits back; the pipeline of the network runs in between. A view is a frozen object with ``apply(inputs)`` and
optionally ``invert(maps)``. Your own view is a function from tensor to tensor, named by its address
``package.module:view``.

    gamma(1.4)              one view            gamma(1.4)+mirror(x)    one after the other
    mri                     a named set         random(12)              12 random views, seeded by case
    mri,random(12)          a list
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from casewise.adapt.views.transforms import (
    Bias,
    Blur,
    Clip,
    Contrast,
    Gamma,
    GreyWorld,
    Mirror,
    Noise,
    Rotate90,
    Scale,
    Sharpen,
    Shift,
    Stretch,
    Turn,
)  # fmt: skip
from casewise.core.errors import BadInput
from casewise.core.registry import Registry, from_address
from casewise.core.seeds import seed_of


@runtime_checkable
class View(Protocol):
    """A transform of prepared inputs, (n, channel, *space). ``invert`` is optional."""

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        ...


def inverted(view: View, maps: Tensor) -> Tensor:
    """Map predictions of a view back to the geometry of the case."""
    back: Callable[[Tensor], Tensor] | None = getattr(view, "invert", None)
    return maps if back is None else back(maps)


@dataclass(frozen=True)
class Identity:
    """The unchanged case."""

    def __str__(self) -> str:
        return "identity"

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the same tensor."""
        return inputs


@dataclass(frozen=True)
class ViewChain:
    """Several views, applied in order and inverted in reverse order."""

    views: tuple[View, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.views))

    def apply(self, inputs: Tensor) -> Tensor:
        """Apply all views."""
        for view in self.views:
            inputs = view.apply(inputs)
        return inputs

    def invert(self, maps: Tensor) -> Tensor:
        """Invert all views."""
        for view in reversed(self.views):
            maps = inverted(view, maps)
        return maps


@dataclass(frozen=True)
class Own:
    """A user's view: a function, named by its address."""

    address: str
    function: Callable[[Tensor], Tensor] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.address

    def apply(self, inputs: Tensor) -> Tensor:
        """Call the function with a copy of the inputs."""
        seen = self.function(inputs.clone())
        if not isinstance(seen, Tensor) or seen.ndim != inputs.ndim or seen.shape[:2] != inputs.shape[:2]:
            got = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
            raise BadInput(f"view {self.address} must return a tensor like its input {tuple(inputs.shape)}, got {got}")
        return seen

    def invert(self, maps: Tensor) -> Tensor:
        """Call the attribute ``invert`` of the function, if it has one."""
        return inverted(self.function, maps)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Drawn:
    """``random(n)``: n random views per case, seeded by the run and the case."""

    count: int
    photos: bool = False  # for photographs: gamma from 0.7 to 1.4, intensity range kept

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 256:
            raise BadInput(f"the number of random views must be from 1 to 256, got {self.count}")

    def __str__(self) -> str:
        return f"random({self.count},photos)" if self.photos else f"random({self.count})"

    def drawn(self, case_id: str, seed: int) -> tuple[View, ...]:
        """Return the views of one case: gamma, contrast, offset, sometimes noise, small rotation and zoom, mirrors."""
        generator = torch.Generator().manual_seed(seed_of(f"views/{seed}", case_id))
        return tuple(self._one(generator) for _ in range(self.count))

    def _one(self, generator: torch.Generator) -> View:
        def between(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand(1, generator=generator, dtype=torch.float64))

        low, high = (0.7, 1.4) if self.photos else (0.9, 2.0)
        power = math.exp(between(math.log(low), math.log(high)))
        contrast, offset = between(0.8, 1.3 if self.photos else 1.2), between(-0.1, 0.1)
        noise, field_seed = between(0, 0.1), int(torch.randint(2**31, (1,), generator=generator))
        noisy, mirrored_x, mirrored_y = (between(0, 1) for _ in range(3))
        degrees, zoom = between(-15, 15), between(0.87, 1.1)
        keep = "range" if self.photos else "moments"
        mirrors = "x" * (mirrored_x < 0.5) + "y" * (mirrored_y < 0.5 and not self.photos)
        parts: list[View] = [Gamma(round(power, 4), keep), Contrast(round(contrast, 4)), Shift(round(offset, 4))]
        parts += [Noise(round(noise, 4), field_seed)] if noisy < 0.25 else []
        parts += [Turn(round(degrees, 3), round(zoom, 4))]
        return ViewChain((*parts, *([Mirror(mirrors)] if mirrors else [])))


VIEWS: Registry[Callable[..., Any]] = Registry(
    "view",
    {
        "identity": Identity,
        "mirror": Mirror,
        "rotate90": Rotate90,
        "scale": Scale,
        "turn": Turn,
        "gamma": Gamma,
        "contrast": Contrast,
        "shift": Shift,
        "bias": Bias,
        "blur": Blur,
        "sharpen": Sharpen,
        "clip": Clip,
        "stretch": Stretch,
        "grey-world": GreyWorld,
        "noise": Noise,
        "random": Drawn,
    },
)
"""Every view by name."""

SETS: Registry[tuple[str, ...]] = Registry(
    "set of views",
    {
        "light": ("mirror(x)", "gamma(1.2)", "gamma(1.4)", "gamma(1.4)+mirror(x)"),
        "mri": (  # this order lets a running consensus stop early; chosen on calibration hearts
            "gamma(1.4)+mirror(x)", "bias(30)", "gamma(1.4)+mirror(xy)", "gamma(1.7)", "mirror(x)",
            "gamma(1.4)+mirror(y)", "gamma(1.2)", "mirror(y)", "gamma(2)", "mirror(xy)", "gamma(1.4)", "sharpen",
        ),
        "ct": ("mirror(x)", "shift(-0.1)", "shift(0.1)", "contrast(0.9)", "contrast(1.1)", "clip(0.5,99.5,range)"),
        "photo": (
            "mirror(x)", "gamma(0.8,range)", "gamma(1.25,range)", "contrast(1.4,range)", "stretch", "scale(1.25)",
        ),
        "driving": (
            "mirror(x)", "gamma(0.6,range)", "gamma(0.8,range)", "gamma(1.25,range)", "contrast(0.7,range)",
            "contrast(1.4,range)", "stretch", "grey-world", "scale(1.25)",
        ),
        "all": (
            "mirror(x)", "mirror(y)", "mirror(xy)", "rotate90(1)", "rotate90(3)", "scale(1.25)",
            "gamma(0.6)", "gamma(0.8)", "gamma(1.2)", "gamma(1.4)", "gamma(1.7)", "gamma(2)", "contrast(0.7)",
            "contrast(1.4)", "bias(30)", "blur", "sharpen", "clip", "stretch", "grey-world", "noise",
        ),
    },
)  # fmt: skip
"""Named sets of views. The unchanged case (M0) is always predicted first and is not listed.

No set contains ``scale(0.75)``: it lowered the metric in all five recordings that have it (benchmarks/RESULTS.md).
"""


def views_of(spec: str) -> tuple[View | Drawn, ...]:
    """Parse a list of views: sets, views, chains with ``+``, ``random(n)`` and addresses, separated by commas.

    >>> [str(view) for view in views_of("light")]
    ['mirror(x)', 'gamma(1.2)', 'gamma(1.4)', 'gamma(1.4)+mirror(x)']
    """
    words = [word.strip() for word in re.split(r",(?![^(]*\))", spec) if word.strip()]
    if not words:
        raise BadInput("name at least one view or set of views, such as views:mri or views:gamma(1.4),mirror(x)")
    listed = [name for word in words for name in (SETS[word] if word in SETS else (word,))]  # noqa: SIM401
    made = [_chained(word) for word in dict.fromkeys(listed)]
    return tuple(view for view in made if not isinstance(view, Identity))


def _chained(word: str) -> View | Drawn:
    parts = [_single(part) for part in word.split("+")]
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, Drawn) for part in parts):
        raise BadInput(f"random cannot be chained with other views, got {word!r}")
    return ViewChain(tuple(part for part in parts if not isinstance(part, Drawn)))


def _single(word: str) -> View | Drawn:
    if ":" in word:
        return _own(word)
    found = re.fullmatch(r"([A-Za-z0-9-]+)(?:\(([^()]*)\))?", word)
    if found is None:
        raise BadInput(f"a view must be name or name(arguments), such as gamma(1.4), got {word!r}")
    name, given = found[1], [text.strip() for text in (found[2] or "").split(",") if text.strip()]
    Registry("view or set of views", {**SETS, **VIEWS})[name]  # raises UnknownName with a suggestion
    if name in SETS:
        raise BadInput(f"{name!r} is a set of views and cannot be chained or have arguments; name it alone")
    arguments: list[Any] = [_argument(name, text) for text in given]
    if name == "random" and arguments[1:]:
        arguments[1] = arguments[1] == "photos"
    try:
        made: View | Drawn = VIEWS.build(name, *arguments)
    except TypeError as error:
        wanted = ", ".join(inspect.signature(VIEWS[name]).parameters)
        raise BadInput(f"view {name} takes ({wanted}), got ({', '.join(given)})") from error
    return made


def _argument(name: str, text: str) -> Any:
    if re.fullmatch(r"[+-]?\d+", text) and name in ("rotate90", "random", "noise"):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _own(address: str) -> Own:
    function = from_address(address, "view")
    if not callable(function):
        raise BadInput(f"'{address}' is not a function; a view must take a tensor and return a tensor")
    return Own(address, function)


def drawn(views: Iterable[View | Drawn], case_id: str, seed: int) -> tuple[View, ...]:
    """Return the views of one case; random views are drawn for the case."""
    return tuple(one for view in views for one in (view.drawn(case_id, seed) if isinstance(view, Drawn) else (view,)))


def renormalizes(view: View | Drawn) -> bool:
    """True if a view changes the scale of intensities, which must not happen where values are absolute (CT)."""
    if isinstance(view, Drawn):
        return not view.photos
    if isinstance(view, ViewChain):
        return any(map(renormalizes, view.views))
    return isinstance(view, Bias) or getattr(view, "keep", None) == "moments"


def count(views: Iterable[View | Drawn]) -> int:
    """Return the number of forward passes for a case, M0 excluded."""
    return sum(view.count if isinstance(view, Drawn) else 1 for view in views)


def unmirrored(views: Sequence[View], axes: Iterable[int]) -> tuple[View, ...]:
    """Remove mirrors along axes that the backbone averages over anyway, and views that are then duplicates.

    Random views stay, so that every case has the same number of views.
    """
    averaged = frozenset(axes)
    found: dict[str, View] = {}
    for view in views:
        parts = view.views if isinstance(view, ViewChain) else (view,)
        kept = tuple(part for part in parts if not (isinstance(part, Mirror) and set(part.places) <= averaged))
        if kept:
            one = view if len(kept) == len(parts) else (kept[0] if len(kept) == 1 else ViewChain(kept))
            found.setdefault(str(one), one)
    return tuple(found.values())
