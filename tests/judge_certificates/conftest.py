"""A labelled synthetic archive with its calibrated policy, shared by the tests of certificates and monitors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from worlds.cohorts import synthetic_archive

from casewise.archive.store import Archive
from casewise.core.records import Policy
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import write_policy


@dataclass(frozen=True)
class Site:
    """One calibration site."""

    archive: Archive
    policy: Policy

    @property
    def path(self) -> Path:
        return self.archive.path


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    archive = synthetic_archive(tmp_path_factory.mktemp("certify") / "site", cases=40, harmful=0.4)
    policy = calibrate(archive, "cardiac")
    write_policy(archive.path, policy)
    return Site(archive, policy)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    path = tmp_path_factory.mktemp("certify") / "other"
    return synthetic_archive(path, cases=30, harmful=0.4, seed=7, prefix="other", split="evaluation")


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """Labelled cases that the policy was not fitted on and that no evaluation keeps to itself."""
    return synthetic_archive(
        tmp_path_factory.mktemp("certify") / "second", cases=30, harmful=0.4, seed=7, prefix="other"
    )
