r"""The risk among the kept cases of one deployed batch: a promise that keeping little cannot meet.

The other certificates average over all cases, and a case that is rolled back counts 0. Here the mean is over the kept
patients only, of the m that are deployed. With calibration scores :math:`s_i` and losses :math:`L_i \in \{0, 1\}`,

.. math:: \hat t = \max\Big\{t :\ \frac{1 + \sum_i L_i 1\{s_i \le t\}}{\max(1, \#\{j : s_j \le t\})}\,
          \frac{m}{n + 1} \le \alpha\Big\}

over the deployed scores :math:`s_j`. Keeping :math:`s_j \le \hat t` is Benjamini-Hochberg on conformal p-values (Jin
and Candes, 2023), so :math:`E[\sum_{kept} L_j / \max(1, \#kept)] \le \alpha` where all patients are exchangeable.

**Losses between 0 and 1.** A coin with probability :math:`L_i` is tossed for each calibration patient. The selection
reads these coins and the scores, never a coin of a deployed patient; given its loss that coin is independent of the
selection and has mean :math:`L_j`, so the bound on the mean of the coins is the bound on the mean of the losses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.certificates.certify_router import Promise, issued, noted
from casewise.judge.certificates.crc import conformal_cases
from casewise.judge.certificates.evidence import check_router, router_evidence, verdict_of
from casewise.judge.certificates.loss_table import ACCEPT, Floats, check_level, check_losses
from casewise.judge.policy import check_held_out, controller_of


def selected(
    scores: ArrayLike, losses: ArrayLike, deployed: ArrayLike, alpha: float, *, below: float = np.inf, seed: int = 0
) -> float | None:
    """The largest score that may be kept in this batch; None where nothing may.

    Only scores under ``below`` are candidates: what a router rolls back by its own cut stays rolled back.

    >>> selected([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 0, 1, 1, 1], [1.5, 2.5, 3.5, 8.5], alpha=0.2)
    3.5
    >>> selected([1, 2, 3], [0, 0, 0], [1, 2], alpha=0.2) is None  # three are too few for a fifth
    True
    """
    s, loss = np.asarray(scores, dtype=float), check_losses(losses)
    stream = np.asarray(deployed, dtype=float)
    if s.shape != loss.shape or s.ndim != 1 or not len(s) or not len(stream):
        raise BadInput(f"need one score and one loss for each patient, got {s.shape}, {loss.shape} and {stream.shape}")
    coins = np.random.default_rng(seed).random(len(loss)) < loss  # exactly the losses where they are 0 or 1
    cuts = np.unique(stream[stream < below])
    harmed = 1.0 + (coins[:, None] & (s[:, None] <= cuts[None, :])).sum(axis=0)
    kept = (stream[:, None] <= cuts[None, :]).sum(axis=0)
    safe = np.flatnonzero(harmed / kept * len(stream) / (len(s) + 1) <= check_level("alpha", alpha) + ACCEPT)
    return float(cuts[safe[-1]]) if safe.size else None


def by_patient(values: Floats, clusters: Sequence[Hashable], join: Any) -> Floats:
    """One value per patient: the worst score, the mean loss. A patient is kept where all of its cases are."""
    names = np.asarray([str(name) for name in clusters])
    return np.array([join(values[names == name]) for name in np.unique(names)])


def certify_kept(
    archive: Archive, policy: Policy, asked: Promise, deployed: Archive, *, force: bool = False
) -> tuple[Certificate, Policy]:
    """A certificate for the cases that a router keeps in one deployed batch, whose labels are not needed.

    ``deployed`` are the recorded signals of the batch. The cut depends on the batch, so the certificate and its policy
    are for these cases and no others.
    """
    if len(asked.losses) != 1 or asked.delta is not None:
        raise BadInput("the risk among the kept is certified for one loss, in expectation (method crc)")
    check_router(policy)
    if policy.groups:
        raise BadInput("the risk among the kept is certified for a router with one pair of cut-points; use mode union")
    check_held_out(policy, deployed.entries.values())
    said = noted(archive, policy, {"method": "among the kept", "batch": deployed.digest, **_plain(asked)}, force=force)
    evidence = router_evidence(archive, policy, margin=asked.margin)
    controller = controller_of(policy)
    cases = list(deployed.ids)
    found = [verdict_of(deployed, controller, case).value for case in cases]
    if any(value is None for value in found) or not found:
        raise TooFewCases(f"{deployed.path} has no case with a coordinate; record the batch first")
    clusters = [deployed.entry(case).cluster or case for case in cases]
    stream = by_patient(np.array(found, dtype=float), clusters, np.max)
    scores = by_patient(evidence.values, evidence.clusters, np.max)
    losses = by_patient(evidence.loss(asked.losses[0]), evidence.clusters, np.mean)
    own = float(policy.options["cut_high"])
    last = selected(scores, losses, stream, asked.alphas[0], below=own, seed=RESAMPLING_SEED)
    cut = None if last is None else float(np.nextafter(last, np.inf))
    units, m = len(scores), len(stream)
    reach = (1.0 / (units + 1), conformal_cases(asked.alphas[0]))
    certificate, certified = issued(archive, policy, asked, evidence, cut, None, reach, (), said)
    kept = 0 if last is None else int((stream <= last).sum())
    statement = (
        f"Among the {kept} of these {m} deployed patients that keep an adaptation, "
        f"{certificate.statement.split(': ', 1)[1]}"
    )
    details = {
        "among": "the kept patients of one batch",
        "batch": deployed.digest,
        "patients": m,
        "kept_in_batch": kept,
    }
    among = replace(
        certificate, details=details, kind="T9", statement=statement, method="selection", kept=kept / m
    )  # fmt: skip
    return among, certified


def _plain(asked: Promise) -> dict[str, Any]:
    return {"losses": list(asked.losses), "alphas": list(asked.alphas), "margin": asked.margin}
