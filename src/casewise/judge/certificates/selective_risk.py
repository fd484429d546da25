r"""Certificates for the risk among the kept cases of one deployed batch.

The other certificates average over all cases, and a case that is rolled back counts 0. Here the mean is over the kept
patients only, of the m that are deployed. With calibration scores :math:`s_i` and losses :math:`L_i \in \{0, 1\}`,

.. math:: \hat t = \max\Big\{t :\ \frac{1 + \sum_i L_i 1\{s_i \le t\}}{\max(1, \#\{j : s_j \le t\})}\,
          \frac{m}{n + 1} \le \alpha\Big\}

over the deployed scores :math:`s_j`. Keeping :math:`s_j \le \hat t` is Benjamini-Hochberg on conformal p-values (Jin
and Candes, 2023), so :math:`E[\sum_{kept} L_j / \max(1, \#kept)] \le \alpha` where all patients are exchangeable.

**Losses between 0 and 1.** Here a patient j gets an e-value. Let :math:`T(\ell)` be the largest of all scores with
:math:`(\ell + \sum_i L_i 1\{s_i \le T\})\, m \le \alpha (n + 1)\, \#\{j : s_j \le T\}`, the threshold had its loss been
:math:`\ell`, and

.. math:: E_j = \min_{0 < \ell \le 1} \frac{(n + 1)\, 1\{s_j \le T(\ell)\}}{\ell + \sum_i L_i 1\{s_i \le T(\ell)\}}

At the true loss the threshold treats patient j and the calibration patients alike, so by exchangeability
:math:`E[L_j E_j] \le E[\sum_i L_i 1\{s_i \le T\} / \sum_i L_i 1\{s_i \le T\}] \le 1`, both sums over all n + 1.
Keeping the k patients with :math:`E_j \ge m / (\alpha k)`, k as large as can be (e-BH, Wang and Ramdas, 2022), then
gives :math:`E[\sum_{kept} L_j / k] \le \sum_j E[L_j E_j]\, \alpha / m \le \alpha`. All patients below T(1) have the
same e-value and the others have 0, so they are kept together or not at all. Losses of 0 or 1 need :math:`\ell = 1`
only, which is the rule above. Nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import ArrayLike

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, Refused, TooFewCases
from casewise.core.records import Policy
from casewise.core.text import UNIT
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.certificates.certify_router import Promise, chosen_p_value, issue, note_attempt
from casewise.judge.certificates.evidence import (
    ACCEPT,
    check_level,
    check_losses,
    check_router,
    cluster_of,
    cluster_rows,
    router_evidence,
)
from casewise.judge.certificates.risk_control import conformal_floor, patients_needed
from casewise.judge.decide import replay_case
from casewise.judge.policy import among_candidates, check_go, check_held_out, controller_of, fitted_on, judge_of


def selected(
    scores: ArrayLike, losses: ArrayLike, deployed: ArrayLike, alpha: float, *, below: float = np.inf,
    binary: bool = False,
) -> float | None:  # fmt: skip
    """Return the largest score that may be kept in this batch; None if nothing may. Infinite scores are never kept.

    Only scores below ``below`` may be kept, because the router's own cut still applies. ``binary`` is True only if
    losses are 0 or 1 by construction.

    >>> selected([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 0, 1, 1, 1], [1.5, 2.5, 3.5, 8.5], alpha=0.2, binary=True)
    3.5
    >>> selected([1, 2, 3], [0, 0, 0], [1, 2], alpha=0.2) is None  # three are too few for a fifth
    True
    """
    s, loss = np.asarray(scores, dtype=float), check_losses(losses)
    stream = np.asarray(deployed, dtype=float)
    if s.shape != loss.shape or s.ndim != 1 or not len(s) or not len(stream):
        raise BadInput(f"need one score and one loss per {UNIT[0]}, got {s.shape}, {loss.shape} and {stream.shape}")
    if binary and not np.isin(loss, (0.0, 1.0)).all():
        raise BadInput("binary=True needs losses of 0 or 1, got others; leave out binary")
    cuts = np.unique(np.concatenate([s, stream]))
    cuts = cuts[(cuts < below) & np.isfinite(cuts)]
    lost = (loss[:, None] * (s[:, None] <= cuts[None, :])).sum(axis=0)
    kept = (stream[:, None] <= cuts[None, :]).sum(axis=0)
    allowed = check_level("alpha", alpha) * kept * (len(s) + 1) / len(stream) + ACCEPT
    room = allowed - lost  # largest loss of one more patient with which this cut is allowed
    safe = np.flatnonzero((room >= 1.0) & (kept > 0))
    if not safe.size:
        return None
    at = int(safe[-1])
    if not binary:
        later, highest = room[at + 1 :], np.maximum.accumulate(room[at + 1 :][::-1])[::-1]
        would_be = (later > 0) & (later >= highest)  # the largest cut for some smaller loss of that patient
        if (lost[at + 1 :] + later)[would_be].max(initial=0.0) > allowed[at]:
            return None
    return float(stream[stream <= cuts[at]].max())


def kept_scores(archive: Archive, policy: Policy, cases: Sequence[str]) -> list[float | None]:
    """Return the score by which each case is kept; infinite if a policy among candidates deploys M0."""
    if not among_candidates(policy):
        controller = controller_of(policy)
        return [replay_case(archive, controller, case).value for case in cases]
    judge = judge_of(replace(policy, options={**policy.options, "cut_high": np.inf}))
    decided = [replay_case(archive, judge, case) for case in cases]
    return [np.inf if one.rolled_back else one.value for one in decided]


def certify_kept(
    archive: Archive, policy: Policy, asked: Promise, deployed: Archive, *, force: bool = False
) -> tuple[Certificate, Policy]:
    """Certify the risk among the cases that a router keeps in one deployed batch; the batch needs no labels.

    ``deployed`` are the recorded signals of the batch. The cut depends on the batch, so the certificate and its policy
    are for these cases and no others.
    """
    if len(asked.losses) != 1 or asked.delta is not None:
        raise BadInput("--among-kept works with one loss and method crc only")
    check_router(policy)
    if policy.groups:
        raise BadInput("--among-kept needs a router with one pair of cut-points; use mode union")
    for labels in (policy, fitted_on(policy, archive.entries.values())):
        check_held_out(labels, deployed.entries.values())
    check_go(policy, force=force)
    cases = list(deployed.ids)
    found = kept_scores(deployed, policy, cases)
    if any(value is None for value in found) or not found:
        raise TooFewCases(f"{deployed.path} has no case with a coordinate; record the batch first")
    # A patient is kept where all of its cases are, so its score is the largest one of its cases.
    stream = cluster_rows(np.array(found, dtype=float), [cluster_of(deployed, case) for case in cases], "max")
    own = float(policy.options["cut_high"])
    most = float((stream < own).mean())  # share that can be kept at all
    if not most:
        raise Refused(f"policy {policy.name!r} keeps no new mask of {deployed.path}, so there is nothing to certify")
    evidence = router_evidence(archive, policy, margin=asked.margin)
    question = {"method": "among the kept", "batch": deployed.digest, **asdict(asked)}
    said = note_attempt(archive, policy, question, force=force)
    values = evidence.values
    if among_candidates(policy):  # cases that it leaves at M0 by itself do not count as kept
        values = np.array(kept_scores(archive, policy, evidence.ids), dtype=float)
    scores = cluster_rows(values, evidence.clusters, "max")
    losses = cluster_rows(evidence.loss(asked.losses[0]), evidence.clusters, asked.within)
    binary = chosen_p_value(asked, evidence) == "binomial"
    last = selected(scores, losses, stream, asked.alphas[0], below=own, binary=binary)
    cut = None if last is None else float(np.nextafter(last, np.inf))
    units, m = len(scores), len(stream)
    reach = (conformal_floor(units) / most, patients_needed(asked.alphas[0] * most))
    certificate, certified = issue(archive, policy, asked, evidence, cut, None, reach, (), said)
    kept = 0 if last is None else int((stream <= last).sum())
    several = m < len(cases) or units < len(evidence.ids)
    who = "all of whose cases keep an adaptation" if several else "that keep an adaptation"
    statement = f"Among the {kept} of these {m} deployed {UNIT[1]} {who}, {certificate.statement.split(': ', 1)[1]}"
    details = {
        "among": f"the kept {UNIT[1]} of one batch",
        "form": "conformal selection" if binary else "e-values",
        "batch": deployed.digest,
        "batch_inputs": {case: deployed.entry(case).input_sha256 for case in cases},
        "patients": m,
        "kept_in_batch": kept,
    }
    among = replace(certificate, kind="T9", method="selection", statement=statement, details=details, kept=kept / m)
    return among, certified
