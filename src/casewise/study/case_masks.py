"""The masks of one case as the pictures need them: label, M0, what ran without control, and what was deployed."""

from __future__ import annotations

from dataclasses import dataclass

from casewise.core.records import SOURCE, Action, Decision, Mask
from casewise.judge.deciding import deployed_mask
from casewise.render.masks import Edits, edits
from casewise.study.study import Study


@dataclass(frozen=True, eq=False)
class CaseMasks:
    """One labelled case."""

    case_id: str
    label: Mask
    source: Mask
    reference: Mask
    deployed: Mask
    reference_edits: Edits


def case_masks(
    study: Study, case_id: str, *, reference: Decision, deployed: Decision | None = None
) -> CaseMasks | None:
    """Read a case once; None when it has no label."""
    archive = study.evaluation
    if not archive.entries[case_id].labelled:
        return None
    masks, label = archive.masks(case_id), archive.label(case_id)
    source, adapted = masks[SOURCE], masks[reference.state.on("")]  # the archive shows one ladder
    if deployed is None:
        output = source
    elif deployed.action is Action.GATE:
        output = deployed_mask(archive, study.controller, deployed)
    else:
        output = (
            masks[deployed.state.on("")]
            if deployed.state.ladder in ("", archive.ladder_name)
            else archive.mask(case_id, deployed.state)
        )
    change = edits(source, adapted, label, measure=study.measure)
    return CaseMasks(case_id, label, source, adapted, output, change)
