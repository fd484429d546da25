"""casewise with the MONAI Deploy App SDK: a folder of DICOM series in, SEG objects and structured reports out.

    python monai_deploy_operator.py -i STUDIES -o OUT -m MODEL

``STUDIES``, ``OUT`` and ``MODEL`` may also come from the SDK's HOLOSCAN_INPUT_PATH, HOLOSCAN_OUTPUT_PATH and
HOLOSCAN_MODEL_PATH, as they do in an application package. ``MODEL`` holds the folder ``network`` (an nnU-Net model
folder), ``policy.json`` (what ``casewise calibrate`` or ``certify`` wrote, with ``certificate.json`` where there is
one) and, if predict needs further options, a ``casewise.toml``. Nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from monai.deploy.conditions import CountCondition
from monai.deploy.core import Application, ConditionType, Operator, OperatorSpec

NOT_ALL_DONE = 3  # some series were refused or fell back to M0; their names are in the log


class GuardedSegmentation(Operator):
    """Runs ``casewise predict`` on a folder of series, and passes on the folder with the DICOM objects.

    The folder comes from another operator or, where none is connected, from ``series``.
    """

    def __init__(
        self,
        fragment: Any,
        *args: Any,
        model: str | Path,
        policy: str | Path,
        out: str | Path = "out",
        series: str | Path | None = None,
        config: Path | None = None,
        **kwargs: Any,
    ) -> None:
        self.model, self.policy, self.out = str(model), str(policy), Path(out)
        self.series, self.options_file = series, config
        super().__init__(fragment, *args, **kwargs)

    def setup(self, spec: OperatorSpec) -> None:
        """One folder in, if another operator gives one; one folder out, whether or not somebody takes it."""
        spec.input("series_folder").condition(ConditionType.NONE)
        spec.output("dicom_folder").condition(ConditionType.NONE)

    def compute(self, op_input: Any, op_output: Any, context: Any) -> None:
        """A process of its own: a crash or a leak in one study does not reach the application."""
        folder = op_input.receive("series_folder") or self.series
        if folder is None:
            raise ValueError("no folder of series: connect series_folder, or give GuardedSegmentation series=FOLDER")
        program = [
            sys.executable,
            "-m",
            "casewise",
            *(["--config", str(self.options_file)] if self.options_file else []),
        ]
        words = ["-i", str(folder), "-o", str(self.out), "-m", self.model, "--policy", self.policy, "--verbose"]
        done = subprocess.run([*program, "predict", *words])
        if done.returncode not in (0, NOT_ALL_DONE):
            raise RuntimeError(f"casewise predict ended with exit code {done.returncode}; see its messages above")
        op_output.emit(self.out / "dicom", "dicom_folder")


class GuardedSegmentationApp(Application):
    """The operator alone, once, on the folders that the SDK names."""

    def compose(self) -> None:
        """Folders from the command line or, in a package, from the environment."""
        places = Application.init_app_context(self.argv)
        model = Path(places.model_path)
        config = model / "casewise.toml"
        guard = GuardedSegmentation(
            self,
            CountCondition(self, 1),
            model=model / "network",
            policy=model / "policy.json",
            out=places.output_path,
            series=places.input_path,
            config=config if config.exists() else None,
            name="casewise",
        )
        self.add_operator(guard)


if __name__ == "__main__":
    GuardedSegmentationApp().run()
