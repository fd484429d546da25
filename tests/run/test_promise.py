"""A run stands under the certificate of its own policy and model, and under nobody else's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from worlds.cohorts import SYNTHETIC, synthetic_archive

from casewise.core.errors import Mismatch, Refused
from casewise.core.records import Policy
from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certificate import check_certificate, check_feasible, write_certificate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.policy import write_policy
from casewise.run.assemble import certificate_for


@dataclass(frozen=True)
class Site:
    folder: Path
    plain: Policy
    certified: Policy

    @property
    def file(self) -> str:
        return str(self.folder / "policy-certified.json")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    archive = synthetic_archive(tmp_path_factory.mktemp("promise") / "site", cases=40, harmful=0.3)
    plain = calibrate(archive, "cardiac")
    certificate, certified = certify_router(archive, plain, Promise(alphas=(0.3,)))
    assert certificate.feasible
    write_certificate(archive.path, certificate)
    write_policy(archive.path / "policy-certified.json", certified)
    return Site(archive.path, plain, certified)


def test_a_certified_policy_finds_its_certificate_beside_it(site: Site) -> None:
    found = certificate_for(site.certified, site.file, None)
    assert found is not None
    assert found.alpha == 0.3


def test_a_plain_policy_promises_nothing(site: Site) -> None:
    assert certificate_for(site.plain, str(site.folder), None) is None


def test_a_certificate_of_another_policy_is_refused(site: Site) -> None:
    looser = replace(site.plain, options={**site.plain.options, "cut_high": 10 * site.plain.options["cut_high"]})
    named = certificate_for(looser, None, site.folder)
    assert named is not None
    with pytest.raises(Mismatch, match="the certificate is for policy"):
        check_certificate(named, looser, SYNTHETIC)
    with pytest.raises(Mismatch, match="the certificate is for policy"):
        certificate_for(replace(site.certified, steps=9), site.file, None)


def test_another_model_is_refused(site: Site) -> None:
    found = certificate_for(site.certified, site.file, None)
    assert found is not None
    with pytest.raises(Mismatch, match="issued for another model"):
        check_certificate(found, site.certified, replace(SYNTHETIC, model="another"))


def test_a_certified_policy_without_its_certificate_is_refused(site: Site, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="keep the two together"):
        certificate_for(site.certified, str(tmp_path / "policy-certified.json"), None)


def test_a_failed_attempt_is_no_promise(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "small", cases=8, harmful=0.9)
    certificate, certified = certify_router(archive, calibrate(archive, "cardiac"), Promise(alphas=(0.01,)), force=True)
    write_certificate(archive.path, certificate)
    file = str(archive.path / "policy-certified.json")
    assert certified.controller == "m0"
    assert certificate_for(certified, file, None) is None
    named = certificate_for(certified, file, archive.path)
    assert named is not None
    with pytest.raises(Refused, match="nothing is certified"):
        check_feasible(named)
