"""Which part of the cases this process takes: nnU-Net's flags, or the SLURM array it runs in."""

from __future__ import annotations

from collections.abc import Mapping

from casewise.core.errors import BadInput


def part_from(num_parts: int | None, part_id: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(number of parts, own part). Flags win; without flags a SLURM array of tasks is one part a task.

    >>> part_from(None, None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"})
    (4, 2)
    """
    if num_parts is not None or part_id is not None:
        return num_parts or 1, part_id or 0
    count = environment.get("SLURM_ARRAY_TASK_COUNT")
    if count is None:
        return 1, 0
    try:
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        return int(count), (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
    except (KeyError, ValueError) as error:
        raise BadInput(f"the SLURM array variables are incomplete ({error}); pass -num_parts and -part_id") from error
