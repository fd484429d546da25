"""The service from outside: real sockets, a real client, real masks."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner
from worlds.browsers import browser, needs_chromium

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.adapt.snapshot import fingerprint
from casewise.cli import app
from casewise.core.errors import Mismatch, Refused
from casewise.core.records import Binding, Case, Policy
from casewise.deployment import Deployment
from casewise.guard import guard
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.monitors.audits import Audit
from casewise.judge.monitors.exchangeability import Exchangeability
from casewise.judge.monitors.watch import OVERTAKEN, Watch, read_watch, write_watch
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.predict_folder import predict_folder, prediction_work
from casewise.serve.access import ServiceSettings

__all__ = ["browser"]

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)
FIXED = Policy("fixed-k", "fixed-k", {"step": 1}, 1)
SOURCE_ONLY = Policy("m0", "m0", {}, 0)
NAME = "casewise.adapt.networks:PlainUNet"

Scans = list[NDArray[np.float32]]


def file_of(image: NDArray[Any]) -> bytes:
    """(channel, slices, rows, columns) of one channel as the bytes of a NIfTI file."""
    volume = image[0] if image.ndim == 4 else image
    return bytes(nibabel.Nifti1Image(volume.T, np.eye(4)).to_bytes())


def sent(client: httpx.Client, image: NDArray[Any]) -> httpx.Response:
    return client.post("/segment", content=file_of(image), params={"answer": "json"})


def facts_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["facts"])


def mask_of(answer: httpx.Response) -> NDArray[Any]:
    content = base64.b64decode(answer.json()["mask"])
    return np.asarray(nibabel.Nifti1Image.from_bytes(content).dataobj).T


def expected(running: Any, image: NDArray[Any], policy: Policy = FIXED) -> NDArray[Any]:
    """What the library itself says, without HTTP."""
    controller = CONTROLLERS.build(policy.controller, **policy.options)
    case = Case("any", image)
    found = guard(case, running.deployment.backbone, controller, "tent", steps=1, learning_rate=0.05, min_area=4)
    return found.mask


def test_health_and_the_model_are_described(service: Any) -> None:
    with service.client() as client:
        assert client.get("/health/live").json() == {"live": True}
        assert client.get("/health/ready").json() == {"ready": True, "places": 8, "taken": 0}
        model = client.get("/model").json()
        assert (model["name"], model["channels"], model["policy"]) == (NAME, 1, "fixed-k")


def test_a_posted_nifti_gives_the_file_that_predict_writes(
    service: Any, volumes_model: Model, scans: Scans, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    path = tmp_path / "images" / "heart.nii.gz"
    nibabel.save(nibabel.Nifti1Image(scans[1][0].T, np.diag([1.5, 1.5, 8.0, 1.0])), path)
    deployment = Deployment(volumes_model, FIXED, {"": HOW})
    work = prediction_work(deployment, gathered_cases(volumes_model.load(), path.parent), tmp_path / "out")
    list(predict_folder(work, LocalEngine()))
    with service.client() as client:
        answer = client.post("/segment", content=path.read_bytes(), params={"case_id": "heart"})
        in_json = client.post("/segment", content=path.read_bytes(), params={"answer": "json"})
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.content == (tmp_path / "out" / "heart.nii.gz").read_bytes()
    assert json.loads(answer.headers["Casewise-Facts"])["decision"]["action"] == "keep"
    assert in_json.json()["facts"]["status"] == "done"


def test_a_posted_png_gives_a_png_of_labels(serving: Any, pictures_model: Model) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (32, 48, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    with serving(model=pictures_model) as running:
        with running.client() as client:
            answer = client.post("/segment", content=file.getvalue())
        assert answer.headers["content-type"] == "image/png"
        mask = np.asarray(Image.open(io.BytesIO(answer.content)))
        np.testing.assert_array_equal(mask, expected(running, np.moveaxis(picture, -1, 0)))


def test_a_late_request_gets_m0_and_the_reason(serving: Any, scans: Scans) -> None:
    with serving(timeout_s=1e-6) as running:
        with running.client() as client:
            answer = sent(client, scans[0])
        facts = facts_of(answer)
        assert (facts["decision"]["action"], facts["status"], facts["decision"]["deployed"]) == (
            "rollback",
            "fallback",
            0,
        )
        assert facts["error"] == "the time limit of the case was reached"
        only = expected(running, scans[0], Policy("m0", "fixed-k", {"step": 0}, 1))
        np.testing.assert_array_equal(mask_of(answer), only)


def test_concurrent_requests_get_the_answers_of_sequential_ones_and_leave_the_weights(
    service: Any, scans: Scans
) -> None:
    network = service.deployment.backbone.network
    before = fingerprint(network)
    alone = [expected(service, image) for image in scans]
    with service.client() as client, ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda image: sent(client, image), scans))
    for answer, mask in zip(answers, alone, strict=True):
        np.testing.assert_array_equal(mask_of(answer), mask)
    assert len({mask.tobytes() for mask in alone}) == len(scans)
    assert fingerprint(network) == before


def half_sent(port: int, body: bytes) -> socket.socket:
    """A client that has sent its headers and all but the last byte of its body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /segment HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


def taken(client: httpx.Client) -> int:
    return int(client.get("/health/ready").json()["taken"])


def test_a_full_queue_answers_429_and_says_when_to_retry(serving: Any, scans: Scans) -> None:
    body = file_of(scans[0])
    with serving(places=1) as running, running.client() as client, half_sent(running.port, body) as first:
        while taken(client) == 0:
            time.sleep(0.01)
        refused = client.post("/segment", content=body)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert "the queue is full" in refused.json()["error"]
        first.sendall(body[-1:])
        assert first.recv(64).startswith(b"HTTP/1.1 200")
        while taken(client) > 0:
            time.sleep(0.01)
        assert client.post("/segment", content=body).status_code == 200


def test_a_shutdown_finishes_accepted_requests_and_accepts_no_others(serving: Any, scans: Scans) -> None:
    body = file_of(scans[0])
    with serving() as running, half_sent(running.port, body) as late:
        with running.client() as client:
            while taken(client) == 0:
                time.sleep(0.01)
        running.uvicorn.should_exit = True
        while True:
            try:
                socket.create_connection(("127.0.0.1", running.port), timeout=1).close()
                time.sleep(0.01)
            except OSError:
                break
        late.sendall(body[-1:])
        assert late.recv(64).startswith(b"HTTP/1.1 200")


def test_a_large_body_is_refused_by_its_announced_length_and_by_counting(serving: Any) -> None:
    def endless() -> Any:
        while True:
            yield b"x" * 1024

    with serving(max_bytes=4096) as running, running.client() as client:
        announced = client.post("/segment", content=b"x" * 4097)
        assert announced.status_code == 413
        assert "must have at most 4096 bytes" in announced.json()["error"]
        with suppress(httpx.WriteError, httpx.RemoteProtocolError):  # hung up on, before it read the answer
            assert client.post("/segment", content=endless()).status_code == 413
        assert client.post("/segment", content=b"x" * 4096).status_code == 400


def test_a_body_that_does_not_come_loses_its_place(serving: Any, scans: Scans) -> None:
    with serving(upload_s=0.2, places=1) as running:
        with half_sent(running.port, file_of(scans[0])) as slow:
            assert slow.recv(64).startswith(b"HTTP/1.1 408")
        with running.client() as client:
            assert sent(client, scans[0]).status_code == 200


def test_what_cannot_be_understood_is_a_400_and_what_the_model_cannot_take_a_422(service: Any, scans: Scans) -> None:
    with service.client() as client:
        wrong = client.post("/segment", content=file_of(scans[0]), params={"case_id": "../../etc/passwd"})
        flat = sent(client, np.zeros((1, 1, 8, 8), np.float32))
    assert (wrong.status_code, flat.status_code) == (400, 422)
    assert "a case id must have" in wrong.json()["error"]
    assert "holds one value everywhere" in flat.json()["error"]


def test_files_with_false_headers_or_without_an_image_are_refused(service: Any, tmp_path: Path) -> None:
    bomb = nibabel.Nifti1Header()
    bomb.set_data_shape((3000, 3000, 3000))
    bomb["magic"] = b"n+1"
    with service.client() as client:
        lying = client.post("/segment", content=bomb.binaryblock + b"\0" * 4)
        assert lying.status_code == 400
        assert "asks for" in lying.json()["error"]
        for body in (b"", b"not an image", b"\x80\x04\x95pickle"):
            assert client.post("/segment", content=body).status_code == 400


def test_another_host_another_origin_and_no_token_are_refused(serving: Any, scans: Scans) -> None:
    with serving(token="secret") as running, running.client() as client:
        assert client.get("/health/ready").status_code == 200
        assert client.get("/model").status_code == 401
        assert client.get("/model", headers={"Authorization": "Bearer wrong"}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.get("/model", headers=key).status_code == 200
        assert client.get("/model", headers={**key, "Host": "evil.example"}).status_code == 400
        assert client.get("/model", headers={**key, "Origin": "https://evil.example"}).status_code == 403
        assert client.get("/model", headers={**key, "Origin": running.url}).status_code == 200


def test_binding_to_others_needs_a_token() -> None:
    with pytest.raises(Refused, match=r"connect to 0\.0\.0\.0"):
        ServiceSettings(host="0.0.0.0")
    assert ServiceSettings(host="0.0.0.0", token="t").allowed_hosts is None
    assert ServiceSettings(host="::1").is_local


def test_a_policy_of_another_model_is_refused_before_the_service_starts(serving: Any) -> None:
    foreign = Policy("fixed-k", "fixed-k", {"step": 1}, 1, binding=Binding("0" * 64, "tent", "nifti", "16"))
    with pytest.raises(Mismatch, match="fitted on another model"):
        serving(policy=foreign)


def test_an_alarm_of_the_watch_suspends_adaptation_and_the_answer_says_so(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router = Policy(
        "default", "router",
        {"coordinate": "delta", "cut_low": 0.9, "cut_high": 0.99, "low": {"action": "depth", "depth": 1},
         "mid": {"action": "depth", "depth": 1}, "hard": {"action": "rollback"}}, 1, calibration_id="c1",
    )  # fmt: skip
    calm = Exchangeability(tuple(np.linspace(-2.0, -1.0, 200)), 0.001)
    write_watch(tmp_path / "watch.json", Watch("c1", {"exchangeability": calm}))
    with serving(policy=router, watch=tmp_path / "watch.json") as running, running.client() as client:
        rng = np.random.default_rng(0)
        states = []
        for _ in range(30):
            image = rng.normal(size=(1, 16, 16)).astype(np.float32)
            facts = facts_of(sent(client, image))
            states.append(facts["monitor"]["suspended"])
            if states[-1]:
                break
        assert states[0] is False
        assert states[-1] is True, "every value lies above all calibration values, and no alarm came"
        decision = facts_of(sent(client, scans[0]))["decision"]
        assert (decision["action"], decision["executed"]) == ("rollback", 0)
        assert "suspended" in decision["reason"]
    assert read_watch(tmp_path / "watch.json").suspended


# ---- the first page, as a person uses it ----


@needs_chromium
def test_a_person_tries_an_image_on_the_first_page_and_saves_the_mask(
    service: Any, scans: Scans, browser: Any, tmp_path: Path
) -> None:
    image = tmp_path / "heart.nii.gz"
    nibabel.save(nibabel.Nifti1Image(scans[0][0].T, np.eye(4)), image)
    with service.client() as client:
        expected = client.post("/segment", content=image.read_bytes()).content
    wrong: list[str] = []
    tab = browser.new_page()
    tab.set_default_timeout(60_000)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda asked: None if asked.url.startswith((service.url, "data:")) else wrong.append(asked.url))
    tab.goto(service.url)
    tab.set_input_files("#file", image)
    tab.click("#send")
    tab.wait_for_selector("#answer img")
    assert "heart.nii.gz" in tab.inner_text("#answer h2")
    assert tab.evaluate("document.querySelector('#answer img').naturalWidth") > 300
    with tab.expect_download() as saved:
        tab.click("#answer a")
    assert saved.value.suggested_filename == "heart_mask.nii.gz"
    assert Path(saved.value.path()).read_bytes() == expected
    (tmp_path / "broken.nii.gz").write_bytes(b"no image")
    tab.set_input_files("#file", tmp_path / "broken.nii.gz")
    tab.click("#send")
    tab.wait_for_selector("#answer .bad")
    assert tab.inner_text("#answer .bad")
    assert tab.locator("#answer img").count() == 0  # the old answer is gone
    assert wrong == []
    tab.close()


def _watched(tmp_path: Path) -> tuple[Policy, Path]:
    """A router, and a watch over it whose monitors are silent so far."""
    router = Policy(
        "default", "router",
        {"coordinate": "delta", "cut_low": 0.9, "cut_high": 0.99, "low": {"action": "depth", "depth": 1},
         "mid": {"action": "depth", "depth": 1}, "hard": {"action": "rollback"}}, 1, calibration_id="c1",
    )  # fmt: skip
    calm = Exchangeability(tuple(np.linspace(0.0, 1.0, 200)), 0.001)
    watch = Watch("c1", {"exchangeability": calm, "audit": Audit(0.1)}, suspend_on_harm=True)
    return router, write_watch(tmp_path / "watch.json", watch)


def test_two_services_on_one_watch_keep_each_others_cases(serving: Any, scans: Scans, tmp_path: Path) -> None:
    router, file = _watched(tmp_path)
    with serving(policy=router, watch=file) as one, serving(policy=router, watch=file) as other:
        with one.client() as first, other.client() as second:
            for client, image in zip((first, second) * 2, scans, strict=False):
                seen = facts_of(sent(client, image))["monitor"]["cases"]
        assert seen == 4
    assert len(read_watch(file).decided) == 4


def test_an_audit_alarm_that_monitor_writes_reaches_the_service_and_stays(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    (tmp_path / "audits.csv").write_text("case,loss\n" + "".join(f"a{number},1\n" for number in range(30)))
    with serving(policy=router, watch=file) as running, running.client() as client:
        assert facts_of(sent(client, scans[0]))["decision"]["executed"] == 1
        rang = CliRunner().invoke(app, ["monitor", str(tmp_path / "audits.csv"), "--state", str(file)])
        assert rang.exit_code == 1, rang.output
        assert facts_of(sent(client, scans[1]))["decision"]["executed"] == 0
    assert read_watch(file).suspended


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[]"])
def test_a_watch_that_is_lost_or_broken_costs_no_mask_and_is_written_again(
    content: bytes | None, serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    with serving(policy=router, watch=file) as running, running.client() as client:
        sent(client, scans[0])
        file.unlink() if content is None else file.write_bytes(content)
        assert sent(client, scans[1]).status_code == 200
    assert len(read_watch(file).decided) == 2


def test_a_watch_of_another_policy_that_took_its_place_is_not_written_over(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    with serving(policy=router, watch=file) as running, running.client() as client:
        write_watch(file, Watch("c2"))
        answer = sent(client, scans[0])
        assert answer.status_code == 422
        assert "this watch belongs to calibration 'c2'" in answer.json()["error"]
        assert running.deployment.watch.void == OVERTAKEN  # so no page repeats the promise
    assert read_watch(file) == Watch("c2")


def test_a_watch_that_cannot_be_written_is_reported_and_the_next_case_continues(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    blocked = tmp_path / ".watch.json.lock"
    with serving(policy=router, watch=file) as running, running.client() as client:
        blocked.mkdir()
        answer = sent(client, scans[0])
        assert answer.status_code == 503
        assert answer.json()["error"].startswith("the service cannot read or write its files (Is a directory)")
        assert str(tmp_path) not in answer.text
        blocked.rmdir()
        assert sent(client, scans[0]).status_code == 200
    assert len(read_watch(file).decided) == 1
