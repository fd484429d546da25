"""The only loop: reset, predict M0, then update and predict, one step at a time; and the network comes back untouched.

K updates cost K backwards and K+1 forwards: the forward that predicts M_k is the forward whose loss drives update k+1.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.logits import at_resolution, check_finite, labels, logits_of
from casewise.adapt.losses import confidence
from casewise.adapt.objective import ChunkLoss, Objective, Update
from casewise.adapt.parameters import Selection, select
from casewise.adapt.probes import Probe, probes_of
from casewise.adapt.snapshot import restored
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Mask, Signals, State, Trajectory
from casewise.core.seeds import seed_of
from casewise.measure.signals.fragmentation import fragmentation

DEFAULT_RATE = 5e-4  # the medical budget (A6)


class Episode:
    """A network on loan for one case. Use it as a context manager; ``advance`` makes one update and predicts."""

    def __init__(
        self,
        network: nn.Module,
        image: Tensor | NDArray[Any],  # (n, channel, *space)
        objective: Objective,
        *,
        case_id: str = "case",
        learning_rate: float | None = None,
        parameters: Selection = "all-norm",
        seed: int = 0,
        keep_parameters: bool = False,
        keep_entropy: bool = False,
        head: str | None = None,
        min_area: int = 16,
        foreground: bool = True,
        signals: Sequence[str] | Mapping[str, Probe] = (),
        max_slices: int | None = None,
        forward: Callable[[Tensor], Tensor] | None = None,
        predict: Callable[[], Mask] | None = None,
    ) -> None:
        self.network = network
        self.objective = objective
        self.case_id = case_id
        self.seed = seed
        self.parameters = select(network, parameters)
        device = next(iter(self.parameters.values())).device
        self.inputs = torch.as_tensor(image).to(device, torch.float32)
        rate = getattr(objective, "learning_rate", DEFAULT_RATE) if learning_rate is None else learning_rate
        self.learning_rate = float(rate)
        self.step = 0
        self.active: frozenset[str] | None = None
        self.entropy_weight = 1.0
        self.anchor_weight: float | None = None
        self.head = head or ""
        self.classes = 0
        self.keep_parameters, self.keep_entropy = keep_parameters, keep_entropy
        self.min_area, self.foreground = min_area, foreground
        self.max_slices = max_slices or len(self.inputs)
        self._forward, self._predict = forward, predict
        self._probes = probes_of(signals)
        self._masks: list[Mask] = []
        self._signals: list[Signals] = []
        self._diagnostics: list[Mapping[str, float]] = []
        self._seconds: list[float] = []
        self._values: list[dict[str, NDArray[Any]]] = []
        self._entropies: dict[str, NDArray[Any]] = {}
        self._shrunk: dict[State, Mask] = {}
        self._shrunk_signals: dict[State, Signals] = {}
        self._graph: tuple[Tensor, Sequence[int]] | None = None
        self._update: Update | None = None
        self._stack = ExitStack()

    # -- the loan ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Episode:
        with ExitStack() as stack:
            stack.enter_context(restored(self.network, self.parameters.keys()))
            self._borrow()
            self._record(began=time.perf_counter())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._graph = self._update = None
        self._stack.__exit__(kind, error, trace)

    def _borrow(self) -> None:
        self.network.eval()
        self.network.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
            parameter.grad = None
        self.source = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    # -- one step ------------------------------------------------------------------------------------------------

    def advance(self, *, last: bool = False) -> Signals:
        """Make update k, predict M_k, and return its signals. ``last`` lets the prediction run in inference mode."""
        began = time.perf_counter()
        self.step += 1
        self._seed()
        if self._update is None:
            self._update = self.objective.begin(self)
        self.clear_gradients()
        diagnostics = dict(self._update())
        norm = self._gradient_norm()
        self._graph = None
        self.clear_gradients()
        self._record(began=began, last=last, gradient_norm=norm, diagnostics=diagnostics)
        return self._signals[-1]

    def _record(
        self,
        *,
        began: float,
        last: bool = False,
        gradient_norm: float | None = None,
        diagnostics: Mapping[str, float] | None = None,
    ) -> None:
        mask, voxels, surest = self._predicted(keep_graph=not last)
        self._masks.append(mask)
        signals = self._measured(mask, voxels, surest)
        signals["gradient_norm"] = gradient_norm
        self._signals.append(signals)
        signals.update({name: probe(self) for name, probe in self._probes.items()})
        if self.keep_entropy:
            self._entropies[f"entropy_{self.step}"] = voxels
        if self.keep_parameters:
            self._values.append({name: p.detach().cpu().numpy().copy() for name, p in self.parameters.items()})
        if self.step:
            self._diagnostics.append(dict(diagnostics or {}))
        self._seconds.append(time.perf_counter() - began)

    def _measured(self, mask: Mask, voxels: NDArray[Any], surest: float) -> dict[str, float | None]:
        source = self._masks[0]
        signals = fragmentation(source, mask, min_area=self.min_area, foreground=self.foreground).as_signals()
        changed = (mask > 0) != (source > 0) if self.foreground else mask != source
        on_d: float | None = None
        if voxels.shape == mask.shape:
            on_d = float(voxels[changed].mean(dtype=np.float64)) if changed.any() else 0.0
        return {**signals, "entropy": float(voxels.mean(dtype=np.float64)), "msp": surest, "entropy_on_d": on_d}

    # -- what an objective may do (adapt/objective.py) -------------------------------------------------------------

    def logits(self, inputs: Tensor) -> Tensor:
        """A forward: (n, channel, *space) -> (n, classes, *space), at the resolution of the mask."""
        if self._forward is not None:
            raw = self._forward(inputs)
        else:
            raw = at_resolution(logits_of(self.network(inputs)), inputs.shape[2:])
        return check_finite(raw.float(), f"at step {self.step} of case {self.case_id}")

    def backward(self, loss: ChunkLoss, *, inputs: Tensor | None = None) -> float | None:
        """Clear gradients, then accumulate the gradient of sum(numerator)/sum(weight) over the micro-batches."""
        self.clear_gradients()
        moving = self.moving()
        whole = len(self.inputs if inputs is None else inputs) <= self.max_slices
        total = weights = 0.0
        for rows, chunk, logits in self._forwards(inputs):
            numerator, weight = loss(logits, chunk, rows)
            share = float(weight)
            if share:
                torch.autograd.backward(numerator / weight if whole else numerator, inputs=moving)
            total, weights = total + float(numerator.detach()), weights + share
        if not weights:
            return None
        if not whole:
            for parameter in moving:
                if parameter.grad is not None:
                    parameter.grad /= weights
        if not np.isfinite(total):
            raise NotFinite(f"the loss is {total} at step {self.step} of case {self.case_id}; lower the learning rate")
        return total / weights

    def generator(self, salt: int = 0) -> torch.Generator:
        """A CPU generator seeded by (run, case, step, salt)."""
        run = f"{self.seed}/{salt}" if salt else self.seed
        return torch.Generator().manual_seed(seed_of(run, self.case_id, self.step))

    def moving(self) -> list[nn.Parameter]:
        """The parameters that may move in this update."""
        return [p for name, p in self.parameters.items() if self.active is None or name in self.active]

    def changed(self) -> None:
        """Say that parameters were moved through ``.data``."""
        self._graph = None

    def clear_gradients(self) -> None:
        """No parameter has a gradient."""
        for parameter in self.parameters.values():
            parameter.grad = None

    # -- what came of it -----------------------------------------------------------------------------------------

    @property
    def signals(self) -> Sequence[Signals]:
        """Signals of the steps so far, beginning with M0."""
        return self._signals

    @property
    def mask(self) -> Mask:
        """The mask of the current step."""
        return self._masks[-1]

    @property
    def trajectory(self) -> Trajectory:
        """Everything so far."""
        return Trajectory(
            case_id=self.case_id,
            masks=tuple(self._masks),
            signals=tuple(self._signals),
            shrunk=dict(self._shrunk),
            shrunk_signals=dict(self._shrunk_signals),
            parameters=tuple(self._values) if self.keep_parameters else None,
            probabilities=dict(self._entropies) if self.keep_entropy else None,
            made_by=repr(self.objective),
            seed=self.seed,
            seconds=tuple(self._seconds),
            diagnostics=tuple(self._diagnostics),
        )

    def shrink(self, step: int, alpha: float) -> Mask:
        """The mask of theta_0 + (1 - alpha)(theta_k - theta_0), predicted from those weights and recorded (D10)."""
        state = State(step, alpha)
        if state in self._shrunk:
            return self._shrunk[state]
        if step != self.step:
            raise BadInput(
                f"only the current step {self.step} can be shrunk, got {step}; shrink before the next advance()"
            )
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = torch.lerp(current[name], self.source[name], alpha)
            graph = self._graph
            mask, voxels, surest = self._predicted(keep_graph=False)
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]
        self._graph = graph
        self._shrunk[state] = mask
        self._shrunk_signals[state] = self._measured(mask, voxels, surest)
        return mask

    # -- forwards ------------------------------------------------------------------------------------------------

    def _predicted(self, *, keep_graph: bool) -> tuple[Mask, NDArray[Any], float]:
        """(mask, entropy of each voxel, mean largest probability) of the current weights; the last chunk keeps its graph."""
        masks, entropies, surest = [], [], 0.0
        chunks = self._chunks(self.inputs)
        self._graph = None
        for rows in chunks:
            keep = keep_graph and rows == chunks[-1]
            with nullcontext() if keep else torch.inference_mode():
                logits = self.logits(self.inputs[rows])
            self.classes = logits.shape[1]
            self.head = self.head or ("softmax" if self.classes > 1 else "sigmoid")
            if keep:
                self._graph = (logits, self._stamp())
            detached = logits.detach()
            voxels, probability = confidence(detached, self.head)
            masks.append(labels(detached, self.head))
            entropies.append(voxels.cpu().numpy())
            surest += float(probability.sum(dtype=torch.float64))
        mask = self._predict() if self._predict is not None else _joined(masks)
        return mask, _joined(entropies), surest / sum(part.size for part in entropies)

    def _forwards(self, inputs: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, inputs, logits with a graph) of each micro-batch; on the case itself the kept forward comes first."""
        batch = self.inputs if inputs is None else inputs
        chunks = self._chunks(batch)
        kept, self._graph = self._graph, None
        if inputs is None and kept is not None and kept[1] == self._stamp():
            rows = chunks.pop()
            yield rows, batch[rows], kept[0]
        for rows in chunks:
            yield rows, batch[rows], self.logits(batch[rows])

    def _chunks(self, batch: Tensor) -> list[slice]:
        return [slice(i, min(i + self.max_slices, len(batch))) for i in range(0, len(batch), self.max_slices)]

    def _stamp(self) -> list[int]:
        """Counts every in-place change of a parameter, so that a stale graph is never used."""
        return [parameter._version for parameter in self.parameters.values()]

    def _gradient_norm(self) -> float | None:
        """L2 norm of the gradient that took the step (C8); None where the objective used none."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))) if gradients else None

    def _seed(self) -> None:
        seed = seed_of(self.seed, self.case_id, self.step)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Chunks of (n, *space) as one array; a batch axis of one is dropped."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole[0] if len(whole) == 1 else whole


def run_episode(
    network: nn.Module,
    image: Tensor | NDArray[Any],
    objective: Objective,
    *,
    steps: int,
    shrink: Sequence[State] = (),
    **options: Any,
) -> Trajectory:
    """Adapt a network to one case, record every candidate, and leave the network as it was found."""
    with Episode(network, image, objective, **options) as episode:
        for step in range(1, steps + 1):
            episode.advance(last=step == steps)
            for state in shrink:
                if state.step == step:
                    episode.shrink(step, state.shrink)
        return episode.trajectory
