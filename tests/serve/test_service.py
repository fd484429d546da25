"""The service from outside: real sockets, a real client, real masks."""

from __future__ import annotations

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
from casewise.adapt.snapshot import fingerprint
from casewise.cli import app
from casewise.core.errors import Mismatch, Refused
from casewise.core.records import Action, Binding, Case, Decision, Policy, State
from casewise.deployment import Deployment, Model
from casewise.guard import guard
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.monitors.audits import Audit
from casewise.judge.monitors.exchangeability import Exchangeability
from casewise.judge.monitors.watch import OVERTAKEN, Watch, read_watch, write_watch
from casewise.run.assemble import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.predict_folder import predict_folder, prediction_work
from casewise.serve.access import Settings
from casewise.serve.app import QuotaWatch

__all__ = ["browser"]

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)
FIXED = Policy("fixed-k", "fixed-k", {"step": 1}, 1)
SOURCE_ONLY = Policy("m0", "m0", {}, 0)
NAME = "casewise.adapt.networks-PlainUNet"
INFER = f"/v2/models/{NAME}/infer"
LENGTH = "Inference-Header-Content-Length"

Scans = list[NDArray[np.float32]]


def tensor(image: NDArray[Any], **more: Any) -> dict[str, Any]:
    return {"name": "image", "shape": list(image.shape), "datatype": "FP32", **more}


def as_json(image: NDArray[Any], **more: Any) -> dict[str, Any]:
    return {"inputs": [tensor(image, data=image.ravel().tolist())], **more}


def as_bytes(image: NDArray[Any], **more: Any) -> tuple[bytes, dict[str, str]]:
    plain = {"inputs": [tensor(image, parameters={"binary_data_size": image.nbytes})], **more}
    head = json.dumps(plain).encode()
    return head + image.astype("<f4").tobytes(), {LENGTH: str(len(head))}


def mask_of(answer: httpx.Response, name: str = "mask") -> NDArray[Any]:
    assert answer.status_code == 200, answer.text
    found = next(one for one in answer.json()["outputs"] if one["name"] == name)
    return np.array(found["data"], np.uint8).reshape(found["shape"])


def expected(running: Any, image: NDArray[Any], policy: Policy = FIXED) -> NDArray[Any]:
    """What the library itself says, without HTTP."""
    controller = CONTROLLERS.build(policy.controller, **policy.options)
    case = Case("any", image)
    found = guard(case, running.deployment.backbone, controller, "tent", steps=1, learning_rate=0.05, min_area=4)
    return found.mask


def test_health_and_metadata_say_what_the_protocol_asks_for(service: Any) -> None:
    with service.client() as client:
        assert client.get("/v2/health/live").json() == {"live": True}
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.get(f"/v2/models/{NAME}/ready").json() == {"ready": True}
        assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
        model = client.get(f"/v2/models/{NAME}").json()
        assert model["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [1, -1, -1]}]
        assert [one["name"] for one in model["outputs"]] == ["mask", "source"]
        assert model["parameters"]["policy"] == "fixed-k"
        missing = client.get("/v2/models/other")
        assert missing.status_code == 404
        assert missing.json() == {"error": f"the model here is called '{NAME}'"}


def test_json_in_the_guarded_mask_and_the_decision_out(service: Any, scans: Scans) -> None:
    with service.client() as client:
        wanted = [{"name": "mask"}, {"name": "source"}]
        answer = client.post(INFER, json=as_json(scans[0], id="request 1", outputs=wanted))
    np.testing.assert_array_equal(mask_of(answer), expected(service, scans[0]))
    np.testing.assert_array_equal(
        mask_of(answer, "source"), expected(service, scans[0], Policy("m0", "fixed-k", {"step": 0}, 1))
    )
    facts = answer.json()["parameters"]
    assert answer.json()["id"] == "request 1"
    assert (facts["action"], facts["deployed"], facts["status"]) == ("keep", 1, "done")
    assert json.loads(facts["decision"])["case_id"].startswith("case-")


def test_bytes_in_bytes_out_is_the_same_mask(service: Any, scans: Scans) -> None:
    body, headers = as_bytes(scans[0], parameters={"binary_data_output": True})
    with service.client() as client:
        answer = client.post(INFER, content=body, headers=headers)
        assert answer.headers["content-type"] == "application/octet-stream"
        head = json.loads(answer.content[: int(answer.headers[LENGTH])])
        tail = answer.content[int(answer.headers[LENGTH]) :]
        assert head["outputs"][0]["parameters"] == {"binary_data_size": len(tail)}
        mask = np.frombuffer(tail, np.uint8).reshape(head["outputs"][0]["shape"])
        np.testing.assert_array_equal(mask, mask_of(client.post(INFER, json=as_json(scans[0]))))


def test_a_posted_nifti_gives_the_file_that_predict_writes(
    service: Any, volumes_model: Model, scans: Scans, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    path = tmp_path / "images" / "heart.nii.gz"
    nibabel.save(nibabel.Nifti1Image(scans[1][0].T, np.diag([1.5, 1.5, 8.0, 1.0])), path)
    deployment = Deployment(volumes_model, (HOW,), FIXED)
    work = prediction_work(deployment, gathered_cases(volumes_model, path.parent), tmp_path / "out")
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
            answer = client.post(INFER, json=as_json(scans[0]))
            text = client.get("/metrics").text
        facts = answer.json()["parameters"]
        assert (facts["action"], facts["status"], facts["deployed"]) == ("rollback", "fallback", 0)
        assert facts["error"] == "the time limit of the case is over"
        only = expected(running, scans[0], Policy("m0", "fixed-k", {"step": 0}, 1))
        np.testing.assert_array_equal(mask_of(answer), only)
    assert 'casewise_cases_total{action="rollback",status="fallback"} 1' in text


def test_concurrent_requests_get_the_answers_of_sequential_ones_and_leave_the_weights(
    service: Any, scans: Scans
) -> None:
    network = service.deployment.backbone.network
    before = fingerprint(network)
    alone = [expected(service, image) for image in scans]
    with service.client() as client, ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda image: client.post(INFER, json=as_json(image)), scans))
    for answer, mask in zip(answers, alone, strict=True):
        np.testing.assert_array_equal(mask_of(answer), mask)
    assert len({mask.tobytes() for mask in alone}) == len(scans)
    assert fingerprint(network) == before


def half_sent(port: int, body: bytes) -> socket.socket:
    """A client that has sent its headers and all but the last byte of its body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


def taken(client: httpx.Client) -> int:
    line = next(one for one in client.get("/metrics").text.splitlines() if one.startswith("casewise_places_taken "))
    return int(line.split()[1])


def test_a_full_house_answers_429_and_says_when_to_come_back(serving: Any, scans: Scans) -> None:
    body = json.dumps(as_json(scans[0])).encode()
    with serving(places=1) as running, running.client() as client, half_sent(running.port, body) as first:
        while taken(client) == 0:
            time.sleep(0.01)
        refused = client.post(INFER, content=body)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert "every place is taken" in refused.json()["error"]
        first.sendall(body[-1:])
        assert first.recv(64).startswith(b"HTTP/1.1 200")
        while taken(client) > 0:
            time.sleep(0.01)
        assert client.post(INFER, content=body).status_code == 200


def test_a_shutdown_finishes_what_was_let_in_and_nobody_else_is(serving: Any, scans: Scans) -> None:
    body = json.dumps(as_json(scans[0])).encode()
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


def test_too_much_is_refused_by_its_announced_length_and_by_counting(serving: Any) -> None:
    def endless() -> Any:
        while True:
            yield b"x" * 1024

    with serving(max_bytes=4096) as running, running.client() as client:
        announced = client.post("/segment", content=b"x" * 4097)
        assert announced.status_code == 413
        assert "may have 4096 bytes" in announced.json()["error"]
        with suppress(httpx.WriteError, httpx.RemoteProtocolError):  # hung up on, before it read the answer
            assert client.post("/segment", content=endless()).status_code == 413
        assert client.post("/segment", content=b"x" * 4096).status_code == 400
        assert 'casewise_requests_total{path="/segment",status="413"} 1' in client.get("/metrics").text


def test_a_body_that_does_not_come_loses_its_place(serving: Any, scans: Scans) -> None:
    with serving(upload_s=0.2, places=1) as running:
        with half_sent(running.port, json.dumps(as_json(scans[0])).encode()) as slow:
            assert slow.recv(64).startswith(b"HTTP/1.1 408")
        with running.client() as client:
            assert client.post(INFER, json=as_json(scans[0])).status_code == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": []}, "inputs: List should have at least 1 item"),
        ({"inputs": [tensor(np.zeros((1, 8, 8)))]}, "neither data nor"),
        ({"inputs": [tensor(np.zeros((1, 8, 8)), data=[1.0])]}, "it holds 1 values"),
        ({"inputs": [tensor(np.zeros((1, 8, 8)), data=["1"] * 64)]}, "is not a FP32"),
        ({"inputs": [tensor(np.zeros((1, 8, 8)), data=[float("nan")] * 64)]}, "NaN or infinite"),
        ({"inputs": [{**tensor(np.zeros((1, 1, 2)), data=[300, 1]), "datatype": "UINT8"}]}, "do not fit into uint8"),
        ({"inputs": [tensor(np.zeros(64), data=[0] * 64)]}, "3 or 4 axes"),
        ({"inputs": [tensor(np.zeros((2, 8, 8)), data=list(range(128)))]}, "takes 1 channel"),
        ({"parameters": {"case_id": "../../etc/passwd"}}, "a case id holds"),
        ({"inputs": [tensor(np.zeros((1, 8, 8)), parameters={"binary_data_size": 256})]}, "0 bytes are there"),
    ],
)
def test_what_cannot_be_understood_is_a_400_that_says_why(
    service: Any, scans: Scans, change: dict[str, Any], said: str
) -> None:
    body = json.dumps({**as_json(scans[0]), **change})
    with service.client() as client:
        answer = client.post(INFER, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_a_length_of_thousands_of_digits_and_a_spacing_without_end_are_400s(service: Any, scans: Scans) -> None:
    endless = {"name": "spacing_mm", "shape": [3], "datatype": "FP32", "data": [float("inf"), 1.0, 1.0]}
    asked = as_json(scans[0])
    with service.client() as client:
        long = client.post(INFER, content=b"{}", headers={LENGTH: "9" * 5000})
        wide = client.post(INFER, content=json.dumps({"inputs": [*asked["inputs"], endless]}).encode())
    assert (long.status_code, wide.status_code) == (400, 400)
    assert "must be a number up to" in long.json()["error"]
    assert "3 positive values" in wide.json()["error"]


def test_an_image_that_is_not_for_this_model_is_a_422(service: Any) -> None:
    with service.client() as client:
        answer = client.post(INFER, json=as_json(np.zeros((1, 8, 8), np.float32)))
    assert answer.status_code == 422
    assert "holds one value everywhere" in answer.json()["error"]


def test_files_that_lie_or_are_no_images_are_refused(service: Any, tmp_path: Path) -> None:
    bomb = nibabel.Nifti1Header()
    bomb.set_data_shape((3000, 3000, 3000))
    bomb["magic"] = b"n+1"
    with service.client() as client:
        lying = client.post("/segment", content=bomb.binaryblock + b"\0" * 4)
        assert lying.status_code == 400
        assert "asks for" in lying.json()["error"]
        for body in (b"", b"not an image", b"\x80\x04\x95pickle"):
            assert client.post("/segment", content=body).status_code == 400


def test_another_host_another_origin_and_no_token_stay_outside(serving: Any, scans: Scans) -> None:
    with serving(token="secret") as running, running.client() as client:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.get("/metrics", headers=key).status_code == 200
        assert client.get("/metrics", headers={**key, "Host": "evil.example"}).status_code == 400
        assert client.get("/metrics", headers={**key, "Origin": "https://evil.example"}).status_code == 403
        assert client.get("/metrics", headers={**key, "Origin": running.url}).status_code == 200


def test_binding_to_others_needs_a_token() -> None:
    with pytest.raises(Refused, match=r"binding to 0\.0\.0\.0 lets others connect"):
        Settings(host="0.0.0.0")
    assert Settings(host="0.0.0.0", token="t").allowed_hosts is None
    assert Settings(host="::1").is_local


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
            facts = client.post(INFER, json=as_json(image)).json()["parameters"]
            states.append(json.loads(facts["monitor"])["suspended"])
            if states[-1]:
                break
        assert states[0] is False
        assert states[-1] is True, "every value lies above all calibration values, and no alarm came"
        facts = client.post(INFER, json=as_json(scans[0])).json()["parameters"]
        assert (facts["action"], facts["executed"]) == ("rollback", 0)
        assert "suspended" in facts["reason"]
        assert "casewise_monitor_suspended 1" in client.get("/metrics").text
    assert read_watch(tmp_path / "watch.json").suspended


def test_metrics_count_what_happened(serving: Any, scans: Scans) -> None:
    with serving() as running, running.client() as client:
        for image in scans[:2]:
            client.post(INFER, json=as_json(image))
        client.post(INFER, content=b"{")
        client.get("/no/such/path")
        text = client.get("/metrics").text
    assert 'casewise_requests_total{path="/v2/models/{model}/infer",status="200"} 2' in text
    assert 'casewise_requests_total{path="/v2/models/{model}/infer",status="400"} 1' in text
    assert 'casewise_requests_total{path="other",status="404"} 1' in text
    assert 'casewise_cases_total{action="keep",status="done"} 2' in text
    assert "casewise_case_seconds_count 2" in text
    assert 'casewise_case_seconds_bucket{le="+Inf"} 2' in text


def test_quotas_that_do_not_travel_ring_in_the_service_too(serving: Any) -> None:
    quota = {"low": 0, "mid": 0, "hard": 20}  # at calibration everything was rolled back, here nothing is
    router = Policy(
        "default", "router",
        {"coordinate": "delta", "cut_low": 0.9, "cut_high": 0.99, "low": {"action": "depth", "depth": 1},
         "mid": {"action": "depth", "depth": 1}, "hard": {"action": "rollback"}}, 1, calibration_id="c1",
        preflight={"quota": quota},
    )  # fmt: skip
    promise = Certificate(
        kind="T1", statement="at most a tenth is harmed", loss="ha", method="crc", alpha=0.1, delta=None,
        population="cases", units=50, cases=50, floor=0.02, needed=9, cut=0.3, bound=0.09, kept=0.5, deployed={},
        policy=policy_digest(router),
    )  # fmt: skip
    with serving(policy=router, certificate=promise) as running, running.client() as client:
        rng = np.random.default_rng(0)
        told = []
        assert "at most a tenth is harmed" in client.get("/").text
        for _ in range(11):
            image = rng.normal(size=(1, 16, 16)).astype(np.float32)
            facts = client.post(INFER, json=as_json(image)).json()["parameters"]
            told.append("QUOTA: the cut-points do not travel" in facts["warnings"])
        assert told == [False] * 9 + [True] * 2  # the first look is after ten patients, and the alarm stays
        assert "casewise_quota_alarm 1" in client.get("/metrics").text
        page = client.get("/").text
        assert "QUOTA: the cut-points do not travel" in page
        assert "the certificate is void: the quota alarm was raised" in page
        assert "at most a tenth is harmed" not in page  # a promise that does not hold is not repeated


def test_a_patient_counts_once_for_the_quota() -> None:
    policy = Policy("r", "router", {}, 1, preflight={"quota": {"low": 0, "mid": 0, "hard": 20}})
    watch = QuotaWatch(policy)
    for number in range(40):
        watch.seen(Decision(f"c{number}", Action.KEEP, State(1), 1, "router", bucket="low", cluster="one patient"))
    assert watch.alarm is None
    assert watch.monitor is not None
    assert watch.monitor.seen_in == {"low": 1}
    unknown = QuotaWatch(Policy("m0", "m0", {}, 0))
    unknown.seen(Decision("c", Action.KEEP, State(1), 1, "m0"))
    assert unknown.alarm is None


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
                seen = json.loads(client.post(INFER, json=as_json(image)).json()["parameters"]["monitor"])["cases"]
        assert seen == 4
    assert len(read_watch(file).decided) == 4


def test_an_audit_alarm_that_monitor_writes_reaches_the_service_and_stays(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    (tmp_path / "audits.csv").write_text("case,loss\n" + "".join(f"a{number},1\n" for number in range(30)))
    with serving(policy=router, watch=file) as running, running.client() as client:
        assert client.post(INFER, json=as_json(scans[0])).json()["parameters"]["executed"] == 1
        rang = CliRunner().invoke(app, ["monitor", str(tmp_path / "audits.csv"), "--state", str(file)])
        assert rang.exit_code == 1, rang.output
        assert client.post(INFER, json=as_json(scans[1])).json()["parameters"]["executed"] == 0
        assert "casewise_monitor_suspended 1" in client.get("/metrics").text
    assert read_watch(file).suspended


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[]"])
def test_a_watch_that_is_lost_or_broken_costs_no_mask_and_is_written_again(
    content: bytes | None, serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    with serving(policy=router, watch=file) as running, running.client() as client:
        client.post(INFER, json=as_json(scans[0]))
        file.unlink() if content is None else file.write_bytes(content)
        assert client.post(INFER, json=as_json(scans[1])).status_code == 200
    assert len(read_watch(file).decided) == 2


def test_a_watch_of_another_policy_that_took_its_place_is_not_written_over(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    with serving(policy=router, watch=file) as running, running.client() as client:
        write_watch(file, Watch("c2"))
        answer = client.post(INFER, json=as_json(scans[0]))
        assert answer.status_code == 422
        assert "this watch belongs to calibration 'c2'" in answer.json()["error"]
        assert running.deployment.watch.void == OVERTAKEN  # so no page repeats the promise
    assert read_watch(file) == Watch("c2")


def test_a_watch_that_cannot_be_written_is_said_and_the_next_case_goes_on(
    serving: Any, scans: Scans, tmp_path: Path
) -> None:
    router, file = _watched(tmp_path)
    blocked = tmp_path / ".watch.json.lock"
    with serving(policy=router, watch=file) as running, running.client() as client:
        blocked.mkdir()
        answer = client.post(INFER, json=as_json(scans[0]))
        assert answer.status_code == 503
        assert answer.json()["error"].startswith("the service cannot read or write its files (Is a directory)")
        assert str(tmp_path) not in answer.text
        blocked.rmdir()
        assert client.post(INFER, json=as_json(scans[0])).status_code == 200
    assert len(read_watch(file).decided) == 1
