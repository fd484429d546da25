"""A run uses only the certificate of its own policy and model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from worlds.cohorts import SYNTHETIC, synthetic_archive

from casewise.core.errors import Mismatch, Refused
from casewise.core.records import Policy
from casewise.deployment.saved import _policy_at
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import check_certificate, read_certificate, write_certificate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.policy import write_policy


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
    write_policy(archive.path, plain)
    write_policy(archive.path / "policy-certified.json", certified)
    return Site(archive.path, plain, certified)


def test_a_folder_gives_its_certified_policy_and_the_certificate_beside_it(site: Site) -> None:
    for text in (str(site.folder), site.file):
        policy, found = _policy_at(text, None, force=False)
        assert policy == site.certified
        assert found is not None
        assert found.alpha == 0.3


def test_an_uncertified_policy_beside_a_certified_one_is_refused_unless_forced(site: Site) -> None:
    plain = str(site.folder / "policy.json")
    with pytest.raises(Refused, match=r"policy-certified\.json is certified and policy\.json is not"):
        _policy_at(plain, None, force=False)
    assert _policy_at(plain, None, force=True) == (site.plain, None)


def test_a_certificate_of_another_policy_or_model_is_refused(site: Site, tmp_path: Path) -> None:
    found = read_certificate(site.folder)
    looser = replace(site.plain, options={**site.plain.options, "cut_high": 10 * site.plain.options["cut_high"]})
    with pytest.raises(Mismatch, match="the certificate is for policy"):
        check_certificate(found, looser, SYNTHETIC)
    with pytest.raises(Mismatch, match="for another model"):
        check_certificate(found, site.certified, replace(SYNTHETIC, model="another"))
    write_certificate(tmp_path, found)
    write_policy(tmp_path / "policy-certified.json", replace(site.certified, steps=9))
    with pytest.raises(Mismatch, match="the certificate is for policy"):
        _policy_at(str(tmp_path), None, force=False)


def test_a_certified_policy_without_its_certificate_is_refused(site: Site, tmp_path: Path) -> None:
    write_policy(tmp_path / "policy-certified.json", site.certified)
    with pytest.raises(Mismatch, match="needs its certificate"):
        _policy_at(str(tmp_path), None, force=False)


def test_a_failed_attempt_is_no_promise(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "small", cases=8, harmful=0.9)
    certificate, certified = certify_router(archive, calibrate(archive, "cardiac"), Promise(alphas=(0.01,)), force=True)
    write_certificate(archive.path, certificate)
    write_policy(archive.path / "policy-certified.json", certified)
    assert certified.controller == "m0"
    assert _policy_at(str(archive.path), None, force=False) == (certified, None)
