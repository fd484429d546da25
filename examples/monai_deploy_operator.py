"""casewise as an operator of the MONAI Deploy App SDK: a folder of DICOM series in, SEG and reports out.

    class App(Application):
        def compose(self):
            guard = GuardedSegmentation(self, model="/models/heart", policy="/models/heart/archive", name="casewise")
            self.add_operator(guard)

Model and policy lie inside the container; nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from monai.deploy.core import Operator, OperatorSpec

NOT_ALL_DONE = 3  # some series were refused or fell back to M0; their names are in the log


class GuardedSegmentation(Operator):
    """Runs ``casewise predict`` on the folder it is given, and passes on the folder with the DICOM objects."""

    def __init__(self, fragment: Any, *args: Any, model: str, policy: str, out: str = "out", **kwargs: Any) -> None:
        self.model, self.policy, self.out = model, policy, Path(out)
        super().__init__(fragment, *args, **kwargs)

    def setup(self, spec: OperatorSpec) -> None:
        """One folder in, one folder out."""
        spec.input("series_folder")
        spec.output("dicom_folder")

    def compute(self, op_input: Any, op_output: Any, context: Any) -> None:
        """A process of its own: a crash or a leak in one study does not reach the application."""
        folder = op_input.receive("series_folder")
        words = ["-i", str(folder), "-o", str(self.out), "-m", self.model, "--policy", self.policy]
        done = subprocess.run([sys.executable, "-m", "casewise", "predict", *words, "--verbose"])
        if done.returncode not in (0, NOT_ALL_DONE):
            raise RuntimeError(f"casewise predict ended with exit code {done.returncode}; see its messages above")
        op_output.emit(self.out / "dicom", "dicom_folder")
