"""The only loop: reset, predict M0, then update and predict, one step at a time; and the network comes back untouched.

K updates cost K backwards and K+1 forwards: the forward that predicts M_k is the forward whose loss drives update k+1.
With micro-batches (``max_slices``) only the last of them keeps its graph, so that memory stays bounded; the others are
run again for the update, without which K updates would need the memory of the whole batch.
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

from casewise.adapt.forwards import Forward, Forwards
from casewise.adapt.logits import labels
from casewise.adapt.losses import confidence
from casewise.adapt.normalization import PRIOR, depends_on_batch, use_statistics
from casewise.adapt.objective import ChunkLoss, Objective, Update
from casewise.adapt.parameters import Selection, movable
from casewise.adapt.prefix import FrozenPrefix
from casewise.adapt.probes import Probe, probed, probes_of
from casewise.adapt.recording import Prediction, Recording
from casewise.adapt.snapshot import restored
from casewise.adapt.tentstyle import as_objective
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Mask, Signals, State, Trajectory
from casewise.core.seeds import seed_of

DEFAULT_RATE = 5e-4  # the medical budget (A6)


class Episode:
    """A network on loan for one case, as a context manager; it is the ``Adaptable`` that an objective sees."""

    def __init__(
        self,
        network: nn.Module,
        image: Tensor | NDArray[Any],  # (n, channel, *space)
        objective: Any,
        *,
        case_id: str = "case",
        learning_rate: float | None = None,  # None: the objective's own
        parameters: Selection = "all-norm",
        batch_statistics: str = "source",  # "source", "batch" or "blend"; M0 is always predicted in source mode
        blend_prior: float = PRIOR,
        seed: int = 0,
        head: str | None = None,  # "softmax" or "sigmoid"; None: softmax, sigmoid where there is one channel
        min_area: int = 16,
        foreground: bool = True,
        signals: Sequence[str | Probe] = (),  # extra ones, see adapt/probes.py
        keep_parameters: bool = False,
        keep_entropy: bool = False,
        max_slices: int | None = None,
        autocast: str | None = None,
        channels_last: bool = False,
        compile: bool = False,
        cache_frozen: bool = False,  # see adapt/prefix.py
        group_instance_norm: bool = False,  # see adapt/normalization.py
        forward: Forward | None = None,  # logits at the resolution of the mask
        predict: Callable[[], Mask] | None = None,  # the mask from a pipeline of the backbone's own
    ) -> None:
        self.network, self.objective = network, as_objective(objective)
        self.case_id, self.seed = case_id, seed
        self._moves = getattr(self.objective, "moves", "parameters")
        self._movable = movable(network, parameters, self._moves)
        self.parameters = {name: t for name, t in self._movable.items() if isinstance(t, nn.Parameter)}
        self.inputs = _batch(image, next(iter(self._movable.values())).device)
        own_rate = getattr(self.objective, "learning_rate", DEFAULT_RATE)
        self.learning_rate = float(own_rate if learning_rate is None else learning_rate)
        self.batch_statistics, self.blend_prior = batch_statistics, blend_prior
        self.head, self.classes = head or "", 0
        self.step = 0
        self.active: frozenset[str] | None = None
        self.entropy_weight = 1.0
        self.anchor_weight: float | None = None
        self.keep_parameters, self.keep_entropy = keep_parameters, keep_entropy
        self._forwards = Forwards(
            network,
            forward,
            max_slices=max_slices,
            autocast=autocast,
            channels_last=channels_last,
            compiled=compile,
            prefix=FrozenPrefix(network, self._movable.values()) if cache_frozen else None,
        )
        self._check(max_slices)
        self._grouped, self._own_predict = group_instance_norm, predict
        self._probes = probes_of(signals)
        self._record = Recording(min_area, foreground)
        self._graph: tuple[Tensor, list[int]] | None = None
        self._update: Update | None = None
        self._loan: ExitStack | None = None
        self._made_by = (
            f"{self.objective!r}, learning_rate={self.learning_rate:g}, parameters={parameters!r}, "
            f"batch_statistics={batch_statistics!r}"
        )

    def _check(self, max_slices: int | None) -> None:
        if self.head not in ("", "softmax", "sigmoid"):
            raise BadInput(f"head is 'softmax', 'sigmoid' or None, got '{self.head}'")
        chunked = max_slices is not None and max_slices < len(self.inputs)
        whole = self._moves == "statistics" or depends_on_batch(self.network, self.batch_statistics)
        if chunked and whole:
            raise BadInput(
                "micro-batches would change the batch statistics of BatchNorm, and so the step; use max_slices=None, "
                "or an objective that moves parameters with batch_statistics='source'"
            )

    # ---- the loan ----

    def __enter__(self) -> Episode:
        with ExitStack() as stack:
            changing = None if self._moves == "anything" else self._movable.keys()
            stack.enter_context(restored(self.network, changing))
            self._borrow()
            began = time.perf_counter()
            self._keep(self._predicted(keep_graph=True), {"gradient_norm": None})
            self._record.seconds.append(time.perf_counter() - began)
            self._loan = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loan, self._loan, self._graph, self._update = self._loan, None, None, None
        if loan is not None:
            loan.__exit__(kind, error, trace)

    def _borrow(self) -> None:
        self._found_modes = {module: module.training for module in self.network.modules()}
        self._found_gradients = {parameter: parameter.requires_grad for parameter in self.network.parameters()}
        self.network.eval()
        self.network.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.clear_gradients()
        self.source = {name: tensor.detach().clone() for name, tensor in self._movable.items()}
        self._forwards.configure(self.network, grouped=self._grouped)

    # ---- one step ----

    def advance(self, *, last: bool = False) -> Signals:
        """Make update k, predict M_k, and return its signals; ``last`` lets the prediction run in inference mode."""
        if self._loan is None:
            raise BadInput("the network is not on loan; advance() works inside 'with Episode(...) as episode:'")
        began = time.perf_counter()
        self.step += 1
        self._seed()
        if self._update is None:
            self._update = self._begin()
        self.clear_gradients()
        diagnostics = dict(self._as_found(self._update) if self._moves == "anything" else self._update())
        signals = {"gradient_norm": self._gradient_norm()}
        self.clear_gradients()
        self._record.diagnostics.append(diagnostics)
        self._keep(self._predicted(keep_graph=not last), signals)
        self._record.seconds.append(time.perf_counter() - began)
        return self._record.signals[-1]

    def _begin(self) -> Update:
        if use_statistics(self.network, self.batch_statistics, self.blend_prior):
            self._graph = None
            self._forwards.forget()
        return self.objective.begin(self)

    def _as_found(self, update: Update) -> Mapping[str, float]:
        """An update in the modes that the network was found in: for objects that configured it themselves."""
        for module, training in self._found_modes.items():
            module.training = training
        for parameter, required in self._found_gradients.items():
            parameter.requires_grad_(required)
        report = update()
        self.network.eval()
        return report

    def _keep(self, seen: Prediction, more: Mapping[str, float | None]) -> None:
        signals = {**self._record.measured(seen), **more}
        self._record.masks.append(seen.mask)
        self._record.signals.append(signals)
        if self.keep_entropy or "drop" in self._probes:
            self._record.entropies[f"entropy_{self.step}"] = seen.entropy
        signals.update(probed(self._probes, self))
        self.clear_gradients()
        if self.keep_parameters:
            self._record.parameters.append({n: t.detach().cpu().numpy().copy() for n, t in self._movable.items()})

    # ---- what an objective may do (see adapt/objective.py) ----

    def logits(self, inputs: Tensor) -> Tensor:
        """A forward: (n, channel, *space) -> (n, classes, *space), at the resolution of the mask.

        Without a graph it runs in micro-batches; with one it cannot, ``backward`` does.
        """
        chunks = [slice(None)] if torch.is_grad_enabled() else self._forwards.chunks(inputs)
        parts = [self._forwards(inputs[rows], where=self._where) for rows in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward(self, loss: ChunkLoss, *, inputs: Tensor | None = None) -> float | None:
        """Clear gradients, then accumulate the gradient of sum(numerator)/sum(weight) over the micro-batches.

        One micro-batch is divided by its weight before the backward, which is the textbook mean to the last bit;
        several are divided afterwards, when the sum of their weights is known.
        """
        self.clear_gradients()
        moving = self.moving()
        whole = len(self._forwards.chunks(self.inputs if inputs is None else inputs)) == 1
        total = weights = 0.0
        for rows, chunk, logits in self._with_graph(inputs):
            numerator, weight = loss(logits, chunk, rows)
            if float(weight):
                torch.autograd.backward(numerator / weight if whole else numerator, inputs=moving)
            total, weights = total + float(numerator.detach()), weights + float(weight)
        if not weights:
            return None
        if not np.isfinite(total):
            raise NotFinite(f"the loss is {total} {self._where}; lower the learning rate")
        if not whole:
            for parameter in moving:
                parameter.grad = None if parameter.grad is None else parameter.grad / weights
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

    # ---- what came of it ----

    @property
    def signals(self) -> Sequence[Signals]:
        """Signals of the steps so far, beginning with M0."""
        return tuple(self._record.signals)

    @property
    def masks(self) -> Sequence[Mask]:
        """Masks of the steps so far, beginning with M0: the very arrays that are recorded."""
        return tuple(self._record.masks)

    @property
    def record(self) -> Recording:
        """The steps so far, for probes."""
        return self._record

    @property
    def trajectory(self) -> Trajectory:
        """Everything so far."""
        return self._record.trajectory(self.case_id, self._made_by, self.seed, with_entropies=self.keep_entropy)

    def shrink(self, step: int, alpha: float) -> Mask:
        """The mask of theta_0 + (1 - alpha)(theta_k - theta_0), predicted from those weights and recorded (D10).

        Costs one forward. The current step can always be shrunk, an earlier one with ``keep_parameters=True``.
        """
        state = State(step, alpha)
        if state not in self._record.shrunk:
            values = self._values(step)
            between = {name: torch.lerp(value, self.source[name], alpha) for name, value in values.items()}
            seen = self._predicted_with(between)
            self._record.shrunk[state] = seen.mask
            self._record.shrunk_signals[state] = self._record.measured(seen)
        return self._record.shrunk[state]

    def _values(self, step: int) -> dict[str, Tensor]:
        if step == self.step:
            return {name: tensor.detach() for name, tensor in self._movable.items()}
        if not self.keep_parameters or step > self.step:
            raise BadInput(
                f"step {step} cannot be shrunk now: {self.step} updates were made and only the last is kept; "
                "shrink it before the next advance(), or use keep_parameters=True"
            )
        kept = self._record.parameters[step]
        return {name: torch.as_tensor(kept[name]).to(tensor) for name, tensor in self._movable.items()}

    # ---- forwards ----

    def _predicted(self, *, keep_graph: bool) -> Prediction:
        """The current weights' mask; the last micro-batch keeps its graph for the next update."""
        masks, entropies, surest = [], [], 0.0
        self._graph = None
        chunks = self._forwards.chunks(self.inputs)
        for rows in chunks:
            keep = keep_graph and rows == chunks[-1] and self._moves == "parameters"
            with nullcontext() if keep else self._forwards.quiet():
                logits = self._forwards(self.inputs[rows], where=self._where, rows=rows)
            self.classes = logits.shape[1]
            self.head = self.head or ("softmax" if self.classes > 1 else "sigmoid")
            self._graph = (logits, self._stamp()) if keep else None
            voxels, probability = confidence(logits.detach(), self.head)
            masks.append(labels(logits.detach(), self.head))
            entropies.append(voxels.cpu().numpy())
            surest += float(probability.mean()) * len(probability) / len(self.inputs)
        mask = self._own_predict() if self._own_predict is not None else _joined(masks)
        return Prediction(mask, _joined(entropies), surest)

    def _predicted_with(self, values: Mapping[str, Tensor]) -> Prediction:
        """A prediction with other weights, swapped in and out so that the kept graph stays valid."""
        graph, current = self._graph, {name: tensor.data for name, tensor in self._movable.items()}
        try:
            for name, tensor in self._movable.items():
                tensor.data = values[name]
            return self._predicted(keep_graph=False)
        finally:
            for name, tensor in self._movable.items():
                tensor.data = current[name]
            self._graph = graph

    def _with_graph(self, inputs: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, inputs, logits) of each micro-batch; on the case itself the forward of the last mask is used again."""
        batch = self.inputs if inputs is None else inputs
        own = batch is self.inputs
        chunks = self._forwards.chunks(batch)
        kept, self._graph = self._graph, None
        if own and kept is not None and kept[1] == self._stamp():
            rows = chunks.pop()
            yield rows, batch[rows], kept[0]
            del kept
        for rows in chunks:
            yield rows, batch[rows], self._forwards(batch[rows], where=self._where, rows=rows if own else None)

    def _stamp(self) -> list[int]:
        """Counts every in-place change of a parameter, so that a stale graph is never used."""
        return [tensor._version for tensor in self._movable.values()]

    def _gradient_norm(self) -> float | None:
        """L2 norm of the gradient that took the step (C8); None where the objective left none."""
        norms = [parameter.grad.norm() for parameter in self.parameters.values() if parameter.grad is not None]
        return float(torch.stack(norms).norm()) if norms else None

    def _seed(self) -> None:
        seed = seed_of(self.seed, self.case_id, self.step)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    @property
    def _where(self) -> str:
        return f"at step {self.step} of case {self.case_id}"


def _batch(image: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    batch = torch.as_tensor(image).to(device, torch.float32)
    if batch.ndim not in (4, 5) or not batch.numel():
        raise BadInput(
            f"an image is (n, channel, rows, columns) or (n, channel, slices, rows, columns), got {tuple(batch.shape)}"
        )
    return batch.detach()


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Chunks of (n, *space) as one array; a batch axis of one is dropped."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole[0] if len(whole) == 1 else whole


def run_episode(
    network: nn.Module,
    image: Tensor | NDArray[Any],
    objective: Objective | Any,
    *,
    steps: int,
    learning_rate: float | None = None,
    parameters: Selection = "all-norm",
    batch_statistics: str = "source",
    seed: int = 0,
    keep_parameters: bool = False,
    shrink: Sequence[State] = (),
    **options: Any,
) -> Trajectory:
    """Adapt a network to one case, record every candidate, and leave the network as it was found.

    ``image`` is (n, channel, *space): n slices of a volume, or n = 1. ``shrink`` lists states to materialize (D15); the
    other options are those of ``Episode``.
    """
    if steps < 0:
        raise BadInput(f"steps is 0 or more, got {steps}")
    options.update(learning_rate=learning_rate, parameters=parameters, batch_statistics=batch_statistics, seed=seed)
    with Episode(network, image, objective, keep_parameters=keep_parameters, **options) as episode:
        for step in range(1, steps + 1):
            episode.advance(last=step == steps)
            for state in shrink:
                if state.step == step:
                    episode.shrink(step, state.shrink)
        return episode.trajectory
