"""A thousand requests, and a fuzzer over the OpenAPI: no wrong answer, no leak, no 500."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LOAD = Path(__file__).parents[2] / "benchmarks" / "load_service.py"
MEMORY_GROWTH_KIB = 32 * 1024


def test_a_thousand_requests_no_wrong_answer_no_leak(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(LOAD), "--requests", "1000"]
    shown = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\np50 {found['p50_ms']} ms, p95 {found['p95_ms']} ms over {found['requests']} requests")
    assert found["wrong"] == 0
    assert found["different_answers"] == 10
    assert found["weights_unchanged"]
    assert found["resident_kib_at_end"] - found["resident_kib_after_warm_up"] < MEMORY_GROWTH_KIB


def test_a_fuzzer_finds_no_500_and_nothing_that_the_openapi_does_not_say(service: Any) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    wanted = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    operations = list(schemathesis.openapi.from_url(f"{service.url}/openapi.json").get_all_operations())
    assert len(operations) == 5
    for found in operations:
        operation = found.ok()

        @settings(
            max_examples=25, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def fuzzed(case: Any) -> None:
            case.call_and_validate(checks=wanted)

        fuzzed()
