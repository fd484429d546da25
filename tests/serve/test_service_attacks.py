"""Malicious clients and clients that make mistakes: the service still answers the others."""

from __future__ import annotations

import base64
import gzip
import random
import socket
from contextlib import ExitStack
from typing import Any

import nibabel
import numpy as np
import pytest

IMAGE = np.random.default_rng(0).normal(size=(16, 16, 1)).astype(np.float32)
FILE = bytes(nibabel.Nifti1Image(IMAGE, np.eye(4)).to_bytes())


def half_sent(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(b"POST /segment HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    return connection


def test_three_hundred_half_sent_headers_block_nobody(serving: Any) -> None:
    with serving() as running, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(half_sent(running.port))
        with running.client() as client:
            assert client.get("/health/ready").status_code == 200
            assert client.post("/segment", content=FILE).status_code == 200


def test_a_packed_body_is_refused_in_a_sentence(service: Any) -> None:
    with service.client() as client:
        for path in ("/segment",):
            answer = client.post(path, content=gzip.compress(b"0" * 10**6), headers={"content-encoding": "gzip"})
            assert answer.status_code == 415
            assert "the body is compressed (gzip); send the file itself" in answer.json()["error"]


def test_the_first_page_and_the_docs_answer_and_load_nothing_from_elsewhere(service: Any) -> None:
    with service.client() as client:
        for path in ("/", "/docs"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "/segment" in answer.text
            assert "http://" not in answer.text
            assert "https://" not in answer.text


def test_every_path_but_the_probes_needs_the_token(serving: Any) -> None:
    with serving(token="secret") as running:
        for sent in ("", "Bearer", "Bearer wrong", "Basic secret", "Bearer secre", "bearer secret"):
            right = sent.lower().split() == ["bearer", "secret"]
            with running.client(authorization=sent) as client:
                assert client.get("/health/live").status_code == 200
                for path in ("/", "/docs", "/openapi.json", "/model"):
                    assert client.get(path).status_code == (200 if right else 401), path
                assert client.post("/segment", content=FILE).status_code == (200 if right else 401)


def test_a_browser_gives_the_token_as_a_password_and_other_sites_cannot_use_that(serving: Any) -> None:
    def basic(words: str) -> str:
        return f"Basic {base64.b64encode(words.encode()).decode()}"

    with serving(token="secret") as running:
        with running.client() as client:
            refused = client.get("/")
            assert refused.status_code == 401
            assert 'Basic realm="casewise: the token is the password"' in refused.headers["www-authenticate"]
        for sent, right in (("anyone:secret", True), (":secret", True), ("secret", False), ("secret:", False),
                            ("anyone:secret ", False), ("anyone:wrong", False)):  # fmt: skip
            with running.client(authorization=basic(sent)) as client:
                assert client.get("/").status_code == (200 if right else 401), sent
                assert client.post("/segment", content=FILE).status_code == (200 if right else 401), sent
        with running.client(authorization="Basic no-base64!") as client:
            assert client.get("/").status_code == 401
        elsewhere = {"authorization": basic("anyone:secret"), "origin": "http://127.0.0.1:1"}  # another page here
        with running.client(**elsewhere) as client:
            assert client.post("/segment", content=FILE).status_code == 403


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # huge intensities overflow in float32
def test_a_fuzzer_that_reaches_the_reader_finds_no_bug(service: Any) -> None:
    rng, statuses = random.Random(5), []
    with service.client() as client:
        for _ in range(120):
            body = bytearray(FILE)
            for _ in range(rng.randrange(4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            answer = client.post("/segment", content=bytes(body[: rng.choice((None, rng.randrange(len(body))))]))
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400, 422), (answer.status_code, answer.text[:300])
        assert client.post("/segment", content=FILE).status_code == 200
    assert statuses.count(200) >= 5
    assert statuses.count(400) >= 20
