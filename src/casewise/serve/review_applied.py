"""Put the decisions of reviewers into effect: the mask that was chosen for each case, copied, with a log of why.

The prediction folder stays as it is. A review about another output than the one that lies there decides nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, replacing
from casewise.core.errors import BadInput, CasewiseError, Refused
from casewise.serve.review_log import REVIEWS, ReviewLog
from casewise.serve.review_predictions import Predictions

APPLIED = "applied.jsonl"


@dataclass(frozen=True)
class Applied:
    """What became of one case."""

    case: str
    taken: str  # deployed, m0, adapted, or none where there was nothing to take
    why: str
    reviewer: str = ""
    mask: str = ""  # file name in the new folder
    sha256: str = ""
    open: bool = False  # a person still has to decide: flagged, or the review is about another output


def apply_reviews(folder: Path, out: Path) -> list[Applied]:
    """Write the chosen mask of every case into ``out`` (a new folder) and a hash-chained log beside them."""
    if (folder / "manifest.json").is_file():
        raise BadInput(f"{folder} is an archive and holds no mask files; apply reviews to what casewise predict wrote")
    predicted = Predictions(folder)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty; masks that a person chose go into a folder of their own")
    log = ReviewLog(folder / REVIEWS, predicted.audit)
    if log.problems:
        raise Refused(f"the reviews cannot be trusted: {log.problems[0]}; run casewise verify {folder}")
    latest = log.latest()
    found = []
    for case_id in predicted.cases:
        try:
            one = _applied(predicted, case_id, latest.get(case_id), out)
        except CasewiseError as error:  # one bad case costs no other its mask
            one = Applied(case_id, "none", str(error), open=True)
        Chain(out / APPLIED).append("applied", asdict(one))
        found.append(one)
    return found


def _applied(predicted: Predictions, case_id: str, line: dict[str, object] | None, out: Path) -> Applied:
    case = predicted.cases[case_id]
    if not case.has_masks:
        return Applied(case_id, "none", f"there is no output: {case.error}", open=True)
    reviewer = str((line or {}).get("reviewer") or "")
    if line is None:
        taken, why, undecided = "deployed", "nobody reviewed it", case.flagged
    elif line.get("about") != case.about:
        taken, why, undecided = "deployed", "the review is about another output; look at this one", True
    elif line["decision"] == "flag":
        taken, why, undecided = "deployed", f"{reviewer} flagged it", True
    elif line["decision"] == "keep-m0":
        taken, why, undecided = "m0", f"{reviewer} keeps M0", False
    else:
        taken, why, undecided = "adapted", f"{reviewer} keeps the adaptation", False
    state = line.get("adapted") if line is not None else None
    path = predicted.file_of(case_id, taken, None if state is None else str(state))
    target = out / predicted.file_of(case_id, "deployed").name
    with replacing(target) as temporary:
        shutil.copyfile(path, temporary)
    return Applied(case_id, taken, why, reviewer, target.name, file_sha256(target), undecided)
