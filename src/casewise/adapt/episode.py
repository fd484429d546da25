"""The gradient loop: predict M0, then update and predict, one step at a time; the network is restored bit by bit.

K updates cost K backward and K+1 forward passes, because the forward pass that predicts M_k also gives the loss of
update k+1. With micro-batches (``max_slices``), all but the last run again for the update; see
docs/explanation/episodes.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import NoneType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.forwards import Forward, Forwards
from casewise.adapt.objective import ChunkLoss, Update
from casewise.adapt.parameters import depends_on_batch, select, use_batch_statistics
from casewise.adapt.probes import probed, probes_of
from casewise.adapt.recording import Prediction, Recording
from casewise.adapt.snapshot import restored, seed_generators, structure_of, structured, tensors_of
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Mask, Signals, State, Trajectory
from casewise.core.seeds import seed_of
from casewise.measure.signals import check_registered


class Episode:
    """Updates of a network for one case, as a context manager that restores it; objectives get it as ``Adaptable``.

    ``how`` is the :class:`Adaptation`. A backbone gives ``forward`` (logits at the resolution of the mask; a function
    that pads its inputs has a method ``pad``), ``predict`` (the mask from the backbone's own pipeline) and ``head``
    ("softmax" or "sigmoid"; None: sigmoid for one channel, else softmax).
    """

    shrinks: ClassVar[bool] = True
    rungs: ClassVar[tuple[str, ...]] = ()  # empty: updates have numbers and no names

    def __init__(
        self,
        network: nn.Module,
        image: Tensor | NDArray[Any],  # (n, channel, *space)
        how: Adaptation, *, case_id: str = "case", forward: Forward | None = None,
        predict: Callable[[], Mask] | None = None, head: str | None = None,
        before_forward: Callable[[], None] | None = None,  # may raise to stop the case, e.g. when its time is up
    ) -> None:  # fmt: skip
        self.network, self.how, self.objective = network, how, how.built()
        self.case_id, self.seed, self.step = case_id, how.seed, 0
        self._moves = getattr(self.objective, "moves", "parameters")
        self._movable = tensors_of(network) if self._moves == "anything" else dict(select(network, how.parameters))
        inputs = as_inputs(image, next(iter(self._movable.values())))
        self.parameters = {name: t for name, t in self._movable.items() if isinstance(t, nn.Parameter)}
        self.learning_rate = how.rate(self.objective)
        self.active: frozenset[str] | None = None
        self.entropy_weight = 1.0
        self.anchor_weight: float | None = None
        self._forwards = Forwards(
            network, inputs, self._movable, how, forward=forward, predict=predict, head=head,
            before_forward=before_forward,
        )  # fmt: skip
        self._check_micro_batches()
        self._probes = probes_of(how.signals)
        self.record = Recording(how.min_area, how.foreground)
        self._update: Update | None = None
        self._loan: ExitStack | None = None
        self._made_by = (
            f"{self.objective!r}, learning_rate={self.learning_rate:g}, parameters={how.parameters!r}, "
            f"batch_statistics={how.batch_statistics!r}"
        )

    def _check_micro_batches(self) -> None:
        whole = depends_on_batch(self.network, self.how.batch_statistics)
        if whole and len(self._forwards.chunks(self.inputs)) > 1:
            raise BadInput(
                "micro-batches would change the batch statistics of BatchNorm, and so the step; use max_slices=None or "
                "batch_statistics='source'"
            )

    # ---- enter and exit ----

    def __enter__(self) -> Episode:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # updates need gradients
            stack.enter_context(torch.enable_grad())
            changing = None if self._moves == "anything" else self._movable.keys()
            stack.enter_context(restored(self.network, changing))
            began = time.perf_counter()
            self._seed()
            self._borrow()
            self._keep(self._predicted(last=False), {"gradient_norm": None}, began)
            self._loan = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        loan, self._loan, self._update = self._loan, None, None
        self._forwards.drop_graph()
        if loan is not None:
            loan.__exit__(*error)

    def _borrow(self) -> None:
        self._found_modes, self._found_gradients = _modes_of(self.network)
        self.network.eval()
        self.network.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.clear_gradients()
        self.source = {name: tensor.detach().clone() for name, tensor in self._movable.items()}
        self._structure = structure_of(self.network) if self.how.reset == "stream" else []

    def next_case(
        self, image: Tensor | NDArray[Any], case_id: str, *, forward: Forward | None = None,
        predict: Callable[[], Mask] | None = None,
    ) -> None:  # fmt: skip
        """Start the next case of a stream; weights and the state of the objective stay (see ``stream.py``).

        M0 of the case is predicted with the source weights, in the modes and with the statistics of training.
        """
        self.case_id, self.step, self.active = case_id, 0, None
        self.record = Recording(self.how.min_area, self.how.foreground)
        self._forwards = Forwards(
            self.network, as_inputs(image, self.inputs), self._movable, self.how, forward=forward, predict=predict,
            head=self.head,
        )  # fmt: skip
        self._check_micro_batches()
        began = time.perf_counter()
        self._seed()
        with self._forwards.holding(self.source), structured(self.network, self._structure):
            self._keep(self._forwards.prediction(where=self._where, keep_graph=False), {"gradient_norm": None}, began)
        self._forwards.drop_graph()

    # ---- one step ----

    def advance(self, *, last: bool = False) -> Signals:
        """Make update k, predict M_k, and return its signals; ``last`` lets the prediction run in inference mode."""
        if self._loan is None:
            raise BadInput("advance() works only inside 'with Episode(...) as episode:'")
        began = time.perf_counter()
        self.step += 1
        self._seed()
        if self._update is None:
            if self.how.batch_statistics == "batch":
                use_batch_statistics(self.network)
                self._forwards.drop_graph()
            self._update = self._begun()
        self.clear_gradients()
        update = self._as_found if self._moves == "anything" else self._update
        found = update()
        if not isinstance(found, (Mapping, NoneType)):
            raise BadInput(f"an update must return a dict of numbers or None, got {type(found).__name__}")
        self.record.diagnostics.append(dict(found or {}))
        with self.record.metered("gradient_norm"):
            used = {"gradient_norm": self._gradient_norm()}
        self.clear_gradients()
        self._keep(self._predicted(last=last), used, began)
        return self.record.signals[-1]

    def _begun(self) -> Update:
        """Let the objective prepare the case; one that configures the network does so in the modes it was found in."""
        if self._moves != "anything":
            return self.objective.begin(self)
        self._put_modes()
        update = self.objective.begin(self)
        self._found_modes, self._found_gradients = _modes_of(self.network)
        return update

    def _as_found(self) -> Mapping[str, float]:
        """Make an update in the modes that the author of the objective chose for the network."""
        self._put_modes()
        report = self._update() if self._update is not None else {}
        self.network.eval()
        return report

    def _put_modes(self) -> None:
        for module, training in self._found_modes.items():
            module.training = training
        for parameter, required in self._found_gradients.items():
            parameter.requires_grad_(required)

    def _predicted(self, *, last: bool) -> Prediction:
        return self._forwards.prediction(where=self._where, keep_graph=not last and self._moves == "parameters")

    def _keep(self, seen: Prediction, used: Mapping[str, float | None], began: float) -> None:
        signals = {**self.record.measured(seen), **used}
        check_registered(signals)
        self.record.masks.append(seen.mask)
        self.record.signals.append(signals)
        if "drop" in self._probes:
            self.record.entropies[f"entropy_{self.step}"] = seen.entropy
        signals.update(probed(self._probes, self))
        self.clear_gradients()
        if self.how.keep_parameters:
            self.record.parameters.append({n: t.detach().cpu().numpy().copy() for n, t in self._movable.items()})
        self.record.seconds.append(time.perf_counter() - began)

    # ---- what an objective may do (see adapt/objective.py) ----

    @property
    def inputs(self) -> Tensor:
        """The case: (n, channel, *space)."""
        return self._forwards.inputs

    @property
    def classes(self) -> int:
        """Channels of the logits."""
        return self._forwards.classes

    @property
    def head(self) -> str:
        """ "softmax" or "sigmoid"."""
        return self._forwards.head

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of inputs: (n, channel, *space) -> (n, classes, *space), at the resolution of the mask.

        Without a graph, the forward pass runs in micro-batches. With a graph it does not; use ``backward`` for that.
        """
        chunks = [slice(None)] if torch.is_grad_enabled() else self._forwards.chunks(inputs)
        parts = [self._forwards.logits(inputs[rows], where=self._where) for rows in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def padded(self, inputs: Tensor) -> Tensor:
        """Return padded inputs, for calling the network directly; ``logits`` pads its inputs itself."""
        return self._forwards.padded(inputs)

    def backward(self, loss: ChunkLoss, *, inputs: Tensor | None = None) -> float | None:
        """Clear gradients, then accumulate the gradient of sum(numerator)/sum(weight) over the micro-batches.

        A single micro-batch is divided by its weight before the backward pass, so that its gradient is that of the mean
        to the last bit. Several are divided afterwards, when the sum of their weights is known.
        """
        self.clear_gradients()
        moving = self.moving()
        batch = self.inputs if inputs is None else inputs
        whole = len(self._forwards.chunks(batch)) == 1
        total = weights = 0.0
        for rows, chunk, logits in self._forwards.with_graph(batch, where=self._where):
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
        """Drop the kept forward pass after parameters were moved through ``.data``."""
        self._forwards.drop_graph()

    def clear_gradients(self) -> None:
        """Set every gradient to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _gradient_norm(self) -> float | None:
        """Return the L2 norm of the gradient of the update (C8); None if the objective left no gradient."""
        norms = [parameter.grad.norm() for parameter in self.parameters.values() if parameter.grad is not None]
        return float(torch.stack(norms).norm()) if norms else None

    def _seed(self) -> None:
        seed_generators(seed_of(self.seed, self.case_id, self.step))

    @property
    def _where(self) -> str:
        return f"at step {self.step} of case {self.case_id}"

    # ---- result ----

    @property
    def signals(self) -> Sequence[Signals]:
        """Signals of the steps so far, beginning with M0."""
        return tuple(self.record.signals)

    @property
    def updates(self) -> int:
        """Updates that were made; one that failed halfway does not count."""
        return len(self.record.diagnostics)

    @property
    def trajectory(self) -> Trajectory:
        """Everything so far."""
        return self.record.trajectory(self.case_id, self._made_by, self.seed)

    def shrink(self, step: int, alpha: float) -> Mask:
        """Predict and record the mask of the weights theta_0 + (1 - alpha)(theta_k - theta_0) (D10).

        This costs one forward pass. The current step can always be shrunk, an earlier one if ``keep_parameters`` is
        True.
        """
        state = State(step, alpha)
        if state not in self.record.shrunk:
            between = {name: _between(v, self.source[name], alpha) for name, v in self._values(step).items()}
            with self._forwards.holding(between):
                seen = self._forwards.prediction(where=self._where, keep_graph=False)
            self.record.shrunk[state] = seen.mask
            self.record.shrunk_signals[state] = self.record.measured(seen)
        return self.record.shrunk[state]

    def _values(self, step: int) -> dict[str, Tensor]:
        if step == self.step:
            return {name: tensor.detach() for name, tensor in self._movable.items()}
        if not self.how.keep_parameters or step > self.step:
            raise BadInput(
                f"step {step} cannot be interpolated now: {self.step} updates were made and only the last is kept; "
                "interpolate it before the next advance(), or use keep_parameters=True"
            )
        kept = self.record.parameters[step]
        return {name: torch.as_tensor(kept[name]).to(tensor) for name, tensor in self._movable.items()}


def _modes_of(network: nn.Module) -> tuple[dict[nn.Module, bool], dict[nn.Parameter, bool]]:
    """Training modes of the layers, and which parameters need gradients."""
    return {one: one.training for one in network.modules()}, {one: one.requires_grad for one in network.parameters()}


def _between(adapted: Tensor, source: Tensor, alpha: float) -> Tensor:
    """Interpolate: adapted + alpha (source - adapted); integers, such as BatchNorm's counters, stay as they are."""
    return torch.lerp(adapted, source, alpha) if adapted.is_floating_point() else adapted


def as_inputs(image: Tensor | NDArray[Any], like: Tensor) -> Tensor:
    """Return a copy of the image on the device and in the precision of ``like``; nothing then changes the original."""
    batch = torch.as_tensor(image).to(like.device, like.dtype)
    if batch.ndim not in (4, 5) or not batch.numel():
        raise BadInput(
            f"an image must be (n, channel, rows, columns) or (n, channel, slices, rows, columns), got "
            f"{tuple(batch.shape)}"
        )
    with torch.inference_mode(False):  # no gradient may pass a tensor that was made in this mode
        return batch.clone().detach()
