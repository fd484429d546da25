"""The page over real HTTP, without a browser: who is let in, what is served, and where decisions go."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from worlds.predictions import decisions_of

from casewise.core.chain import Chain
from casewise.core.errors import BadInput
from casewise.run.prediction_folder import review_problems, verify_predictions
from casewise.serve.review_log import apply_reviews
from casewise.serve.review_server import review_server


def request(server: Any, method: str, path: str, body: Any = None, **headers: str) -> tuple[Any, bytes]:
    """One request to a path under the token; a keyword replaces a header, as ``Host="evil"``."""
    base = urlsplit(server.url)
    sent = {"Host": base.netloc}
    if method == "POST":
        sent |= {"Origin": f"http://{base.netloc}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    where = path if path.startswith("/") else base.path + path
    connection.request(method, where, None if body is None else json.dumps(body), sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def got(server: Any, path: str) -> Any:
    answer, content = request(server, "GET", path)
    assert answer.status == 200, content
    return json.loads(content)


def decision(server: Any, case: str, word: str, **more: Any) -> dict[str, Any]:
    row = next(row for row in got(server, "cases")["cases"] if row["id"] == case)
    said = {"case": case, "decision": word, "reviewer": "Ada", "about": row["about"], "adapted": row["adapted"]}
    return {**said, **more}


def test_the_worst_case_is_first(predictions, serve):
    with serve(predictions.layout.out) as server:
        rows = got(server, "cases")["cases"]
    assert [row["id"] for row in rows] == ["broken", "undone", "unsaved", "kept"]


def test_a_mask_slice_holds_the_three_masks_label_by_label(predictions, serve):
    with serve(predictions.layout.out) as server:
        detail = got(server, "case/undone")
        middle = detail["shape"][0] // 2
        _, content = request(server, "GET", f"masks/undone?axis=0&slice={middle}")
    pixels = np.asarray(Image.open(io.BytesIO(content)))
    from casewise.data.nifti import read_label

    layout = predictions.layout
    source = read_label(layout.candidates("undone") / "0.nii.gz")[middle]
    adapted = read_label(layout.candidates("undone") / "1.nii.gz")[middle]
    deployed = read_label(layout.mask("undone"))[middle]
    assert np.array_equal(pixels, np.stack([source, adapted, deployed], axis=-1))
    assert set(np.unique(pixels)) == {0, 1, 2, 3}


def test_every_plane_of_image_and_masks_has_the_same_size(predictions, serve):
    with serve(predictions.layout.out, images=predictions.images) as server:
        shape = got(server, "case/kept")["shape"]
        for axis in range(3):
            sizes = {
                Image.open(io.BytesIO(request(server, "GET", f"{kind}/kept?axis={axis}&slice=3&window=near")[1])).size
                for kind in ("masks", "image")
            }
            rows, columns = (shape[other] for other in range(3) if other != axis)
            assert sizes == {(columns, rows)}


def test_an_image_that_is_not_the_segmented_one_is_not_shown(predictions, serve):
    image = predictions.images / "kept_0000.nii.gz"
    image.write_bytes((predictions.images / "undone_0000.nii.gz").read_bytes())
    with serve(predictions.layout.out, images=predictions.images) as server:
        assert "its hash differs" in got(server, "case/kept")["image_problem"]
        assert request(server, "GET", "image/kept?axis=0&slice=0")[0].status == 409


def test_a_mask_that_was_changed_is_not_shown(predictions, serve):
    path = predictions.layout.mask("kept")
    path.write_bytes(predictions.layout.mask("undone").read_bytes())
    with serve(predictions.layout.out) as server:
        answer, content = request(server, "GET", "case/kept")
    assert answer.status == 409
    assert b"was changed after it was written; predict case kept again" in content


def test_a_mask_that_is_a_link_out_of_the_folder_is_refused(predictions, serve, tmp_path):
    path = predictions.layout.mask("kept")
    path.rename(tmp_path / "elsewhere.nii.gz")
    path.symlink_to(tmp_path / "elsewhere.nii.gz")
    with serve(predictions.layout.out) as server:
        answer, content = request(server, "GET", "case/kept")
    assert (answer.status, b"link out of" in content) == (400, True)


def test_decisions_go_to_the_log_of_reviews_and_calibrate_reads_them(predictions, serve):
    out = predictions.layout.out
    with serve(out) as server:
        for case, word in (("undone", "keep-adapted"), ("undone", "keep-m0"), ("kept", "keep-adapted")):
            assert request(server, "POST", "decide", decision(server, case, word))[0].status == 200
        flag = decision(server, "broken", "flag", note="send it again")
        assert request(server, "POST", "decide", flag)[0].status == 200
    assert decisions_of(out / "reviews.jsonl") == {"undone": "keep-m0", "kept": "keep-adapted", "broken": "flag"}
    assert Chain(out / "reviews.jsonl").problems == []
    assert verify_predictions(out) == []


def test_a_decision_is_there_after_a_restart_and_void_for_another_output(predictions, serve):
    out = predictions.layout.out
    with serve(out) as server:
        request(server, "POST", "decide", decision(server, "broken", "flag"))
    with serve(out) as server:
        first = got(server, "cases")["cases"][0]
        assert (first["review"]["decision"], first["review"]["current"]) == ("flag", True)
        predictions.entry("broken", status="failed", error="another reason")
        answer, content = request(server, "POST", "decide", decision(server, "broken", "flag"))
        assert (answer.status, b"was replaced" in content) == (409, True)
    with serve(out) as server:
        assert got(server, "cases")["cases"][0]["review"]["current"] is False


def test_an_edited_log_is_told_to_the_reviewer(predictions, serve):
    out = predictions.layout.out
    with serve(out) as server:
        request(server, "POST", "decide", decision(server, "kept", "keep-m0"))
    log = out / "reviews.jsonl"
    log.write_text(log.read_text().replace("keep-m0", "keep-adapted"))
    with serve(out) as server:
        assert got(server, "cases")["problems"] == ["reviews.jsonl line 1 was edited"]
    assert "reviews.jsonl line 1 was edited" in review_problems(out)


def test_a_line_that_a_killed_writer_left_does_not_stop_the_next_one(predictions, serve):
    out = predictions.layout.out
    with serve(out) as server:
        request(server, "POST", "decide", decision(server, "kept", "flag"))
    with (out / "reviews.jsonl").open("ab") as file:
        file.write(b'{"case": "undone", "deci')
    with serve(out) as server:
        assert request(server, "POST", "decide", decision(server, "undone", "keep-m0"))[0].status == 200
    assert decisions_of(out / "reviews.jsonl") == {"kept": "flag", "undone": "keep-m0"}
    assert Chain(out / "reviews.jsonl").problems == []


def test_a_reviews_file_that_is_something_else_is_not_appended_to(predictions):
    (predictions.layout.out / "reviews.jsonl").write_text('{"case": "kept", "decision": "flag"}\n')
    with pytest.raises(BadInput, match="line 1 is not a line of a hash-chained log; move or restore the file"):
        review_server(predictions.layout.out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reviewer": "  "}, "a reviewer's name has 1 to 100"),
        ({"reviewer": "a\nb"}, "printable characters"),
        ({"decision": "delete"}, "a decision must be one of keep-m0, keep-adapted, both-wrong, flag"),
        ({"note": "x" * 501}, "at most 500 characters"),
        ({"adapted": "7"}, "has no state '7'"),
        ({"adapted": None}, "was not saved"),
        ({"adapted": 3}, "name of a state"),
        ({"about": None}, "as text"),
    ],
)
def test_a_decision_that_cannot_be_is_refused_and_not_written(predictions, serve, change, message):
    with serve(predictions.layout.out) as server:
        said = {**decision(server, "kept", "keep-adapted"), **change}
        answer, content = request(server, "POST", "decide", said)
    assert answer.status == 400
    assert message in json.loads(content)["error"]
    assert not (predictions.layout.out / "reviews.jsonl").exists()


def test_a_case_without_output_can_only_be_flagged(predictions, serve):
    with serve(predictions.layout.out) as server:
        answer, content = request(server, "POST", "decide", decision(server, "broken", "keep-m0"))
    assert (answer.status, b"can only be flagged" in content) == (400, True)


def test_nothing_is_served_without_the_token(predictions, serve):
    with serve(predictions.layout.out) as server:
        for path in ("/", "/cases", "/wrong/cases", f"/{server.token[:-1]}/cases", f"//{server.token}x/"):
            answer, content = request(server, "GET", path)
            assert answer.status == 404
            assert b"kept" not in content


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_name_is_refused(predictions, serve, host):
    with serve(predictions.layout.out) as server:
        assert request(server, "GET", "cases", Host=host)[0].status == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": "9000"}, 413),
        ({"Content_Length": "9" * 5000}, 413),
        ({"Content_Length": "-1"}, 411),
    ],
)
def test_another_page_cannot_write(predictions, serve, headers, status):
    with serve(predictions.layout.out) as server:
        said = decision(server, "kept", "keep-m0")
        assert request(server, "POST", "decide", said, **headers)[0].status == status
    assert not (predictions.layout.out / "reviews.jsonl").exists()


def test_every_answer_forbids_scripts_and_requests_from_elsewhere(predictions, serve):
    with serve(predictions.layout.out) as server:
        for path in ("", "review.js", "cases", "masks/kept?axis=0&slice=0", "/nowhere", "case/none"):
            answer, _ = request(server, "GET", path)
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
            assert "unsafe" not in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert answer.headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("path", ["", "style.css", "review.css", "review.js", "viewer.js", "icon.svg"])
def test_the_page_names_no_address_outside(predictions, serve, path):
    with serve(predictions.layout.out) as server:
        answer, content = request(server, "GET", path)
    assert answer.status == 200
    namespace = b'xmlns="http://www.w3.org/2000/svg"'
    assert re.findall(rb"https?://|[\"'(`]//", content.replace(namespace, b"")) == []


def test_the_page_has_no_inline_script_or_style(predictions, serve):
    with serve(predictions.layout.out) as server:
        page = request(server, "GET", "")[1].decode()
    assert page.count("<script") == 1
    assert "style=" not in page
    assert "<style" not in page
    assert " on" not in page.replace(" only", "").replace(" one", "")


@pytest.mark.parametrize(
    "path",
    [
        "case/..%2f..%2fetc%2fpasswd",
        "masks/%2e%2e",
        "case/none",
        "overlay/kept",
        "nowhere",
        "export/passwd",
        "../audit.jsonl",
    ],
)
def test_an_address_that_is_not_there_is_not_found(predictions, serve, path):
    with serve(predictions.layout.out) as server:
        assert request(server, "GET", path)[0].status == 404


@pytest.mark.parametrize(
    "path",
    [
        "masks/kept?axis=3&slice=0",
        "masks/kept?axis=0&slice=900",
        "masks/kept?axis=0&slice=-1",
        "masks/kept?axis=0&slice=%D9%A1",
        "masks/kept?axis=0&slice=0&state=../1",
        "masks/broken?axis=0&slice=0",
        "image/kept?axis=0&slice=0&channel=1",
        "image/kept?axis=0&slice=0&window=all",
        "cases?" + "&".join(f"a{number}=1" for number in range(20)),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_400(predictions, serve, path):
    with serve(predictions.layout.out, images=predictions.images) as server:
        assert request(server, "GET", path)[0].status == 400


def test_a_client_that_goes_away_or_writes_nonsense_prints_nothing(predictions, serve, capfd):
    with serve(predictions.layout.out) as server:
        place = ("127.0.0.1", server.server_port)
        for line in (f"/{server.token}/masks/kept?axis=0&slice=0", "http://[::1/"):
            with socket.create_connection(place, timeout=10) as client:
                client.sendall(f"GET {line} HTTP/1.1\r\nHost: {place[0]}:{place[1]}\r\n\r\n".encode())
                if "[" in line:
                    assert client.recv(12) == b"HTTP/1.1 404"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
        idle = [socket.create_connection(place, timeout=10) for _ in range(60)]
        assert got(server, "cases")["cases"]
        for client in idle:
            client.close()
    assert capfd.readouterr().err == ""


def test_the_server_listens_to_this_machine_only_and_has_a_long_token(predictions):
    with review_server(predictions.layout.out) as first, review_server(predictions.layout.out) as second:
        assert first.server_address[0] == "127.0.0.1"
        assert len(first.token) >= 32
        assert first.token != second.token


def test_a_port_that_is_taken_is_reported_in_one_line(predictions):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadInput, match=r"cannot be used .* leave --port out"):
            review_server(predictions.layout.out, port=taken.getsockname()[1])


def test_exports_hold_the_last_decision_of_each_case(predictions, serve):
    with serve(predictions.layout.out) as server:
        request(server, "POST", "decide", decision(server, "kept", "flag"))
        request(server, "POST", "decide", decision(server, "kept", "keep-m0", note="=HYPERLINK(1)", reviewer="@ada"))
        answer, table = request(server, "GET", "export/reviews.csv")
        lines = request(server, "GET", "export/reviews.jsonl")[1]
    assert answer.headers["Content-Disposition"] == 'attachment; filename="reviews.csv"'
    (row,) = csv.DictReader(io.StringIO(table.decode()))
    assert (row["case"], row["decision"], row["note"]) == ("kept", "keep-m0", "'=HYPERLINK(1)")
    assert (row["reviewer"], row["adapted"], row["action"]) == ("'@ada", "1", "keep")
    assert lines == (predictions.layout.out / "reviews.jsonl").read_bytes()


def test_image_and_both_masks_are_copied_for_an_editor(predictions, serve):
    out = predictions.layout.out
    with serve(Path(os.path.relpath(out)), images=predictions.images) as server:  # the commands work in any folder
        answer, content = request(server, "POST", "edit/kept", {})
        assert answer.status == 200, content
        assert request(server, "POST", "edit/broken", {})[0].status == 400
        assert request(server, "POST", "edit/kept", {}, Origin="http://evil")[0].status == 403
    found = json.loads(content)
    place = out.with_name("out-editing") / "kept"
    assert found["folder"] == str(place)
    copies = {path.name: path.read_bytes() for path in place.iterdir()}
    assert copies == {
        "kept_image.nii.gz": (predictions.images / "kept_0000.nii.gz").read_bytes(),
        "kept_m0.nii.gz": predictions.layout.source("kept").read_bytes(),
        "kept_deployed.nii.gz": predictions.layout.mask("kept").read_bytes(),
    }
    snap, slicer = found["commands"]
    assert snap == f"itksnap -g {place}/kept_image.nii.gz -s {place}/kept_deployed.nii.gz"
    assert slicer.startswith(f'Slicer --python-code \'slicer.util.loadVolume("{place}/kept_image.nii.gz"); ')
    assert all(f"{place}/{name}" in slicer for name in copies)
    assert verify_predictions(out) == []


def test_a_picture_has_no_slices(tmp_path, new_folder, serve):
    folder = new_folder(tmp_path / "out", ".png")
    source = np.zeros((20, 30), np.uint8)
    source[5:12, 5:12] = 1
    adapted = source.copy()
    adapted[5:12, 12:16] = 2
    folder.add("street", np.arange(600, dtype=np.uint8).reshape(20, 30), source, adapted, value=0.1)
    with serve(folder.layout.out, images=folder.images) as server:
        detail = got(server, "case/street")
        picture = Image.open(io.BytesIO(request(server, "GET", "image/street")[1]))
        masks = np.asarray(Image.open(io.BytesIO(request(server, "GET", "masks/street")[1])))
    assert (detail["shape"], detail["spacing_mm"], picture.size, picture.mode) == ([20, 30], None, (30, 20), "RGB")
    assert (masks[6, 13] == [0, 2, 2]).all()
    (region,) = detail["regions"]
    assert (region["voxels"], region["added"], region["box"]) == (28, 28, [[5, 11], [12, 15]])


def test_a_folder_of_something_else_is_refused(tmp_path):
    for open_folder in (review_server, lambda folder: apply_reviews(folder, tmp_path / "chosen")):
        with pytest.raises(BadInput, match="is not a folder of casewise predict"):
            open_folder(tmp_path)
        with pytest.raises(BadInput, match="is not a folder of casewise predict"):
            open_folder(tmp_path / "mistyped")


def test_help_names_the_options():
    from casewise.cli.review import app

    text = CliRunner().invoke(app, ["review", "--help"]).output
    assert all(option in text for option in ("--images", "--reviewer", "--port", "--no-browser"))


def test_a_decision_of_a_stale_tab_does_not_overrule_one_that_its_reviewer_never_saw(predictions, serve):
    out = predictions.layout.out
    with serve(out) as one, serve(out) as other:
        first = decision(one, "kept", "keep-m0", seen="")
        stale = decision(other, "kept", "keep-adapted", seen="", reviewer="Bob")
        assert request(one, "POST", "decide", first)[0].status == 200
        answer, content = request(other, "POST", "decide", stale)
        assert answer.status == 409
        assert (
            "Ada decided 'keep original' for case kept since you opened it; nothing was written"
            in json.loads(content)["error"]
        )
        ada = json.loads(content)["review"]
        assert got(other, "case/kept")["review"] == ada
        assert request(one, "POST", "decide", first)[0].status == 200  # the same, sent twice
        assert len(Chain(out / "reviews.jsonl").lines()) == 1
        assert request(other, "POST", "decide", {**stale, "seen": ada["hash"]})[0].status == 200
    assert decisions_of(out / "reviews.jsonl") == {"kept": "keep-adapted"}
    assert verify_predictions(out) == []


def test_a_case_that_vanished_while_the_page_was_open_is_reported_in_a_sentence(predictions, serve):
    with serve(predictions.layout.out) as server:
        said = decision(server, "kept", "keep-m0")
        predictions.layout.entry("kept").unlink()
        answer, content = request(server, "POST", "decide", said)
    assert answer.status == 409
    assert json.loads(content)["error"].startswith("case kept was replaced or removed since the page was started")


def test_a_note_in_any_language_is_exported_and_half_a_character_is_refused(predictions, serve):
    note = "<b>\u202e\u05e9\u05dc\u05d5\u05dd\n=1+1 \U0001f642"
    with serve(predictions.layout.out) as server:
        answer, content = request(server, "POST", "decide", decision(server, "kept", "flag", note="\ud83d"))
        assert answer.status == 400
        assert "a note must be text" in json.loads(content)["error"]
        assert request(server, "POST", "decide", decision(server, "kept", "flag", note=note))[0].status == 200
        (row,) = csv.DictReader(io.StringIO(request(server, "GET", "export/reviews.csv")[1].decode()))
    assert row["note"] == note
