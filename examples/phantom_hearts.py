"""Write phantom hearts of a scanner that the embedded model has not seen, for the tutorials.

    python examples/phantom_hearts.py FOLDER [CASES]

The folder then has images/, labels/ and cases.csv. The first half of the cases is marked ``calibration``, the second
half ``evaluation``. The model for them is ``casewise.adapt.networks:phantom_cardiac``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort


def main(folder: str, cases: int = 16) -> None:
    """Write the hearts and say where they are."""
    hearts = cardiac_cohort("B", cases, split="calibration")
    splits = {name: ("calibration", "evaluation")[2 * place >= cases] for place, name in enumerate(hearts.ids)}
    members = {name: replace(one, split=splits[name]) for name, one in hearts.members.items()}
    write_cohort(replace(hearts, members=members), Path(folder))
    print(f"{cases} phantom hearts in {folder}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
