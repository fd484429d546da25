"""The Dockerfile as far as it can be checked without an engine: its instructions, one by one."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from casewise.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    words = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in words]


@pytest.fixture
def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, beginning with its FROM."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def values(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for word, rest in stage if word == name]


def test_the_container_runs_as_a_numbered_user_that_is_not_root(stages: list[list[tuple[str, str]]]) -> None:
    (user,) = values(stages[-1], "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes' runAsNonRoot needs a number"
    words = [word for word, _ in stages[-1]]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "RUN" not in words[words.index("USER") :]


def test_nothing_is_fetched_but_packages_and_only_while_building(stages: list[list[tuple[str, str]]]) -> None:
    for stage in stages:
        assert values(stage, "ADD") == []
        for command in values(stage, "RUN"):
            assert not re.search(r"\b(curl|wget|git)\b", command)
    assert not any("pip" in command for command in values(stages[-1], "RUN"))


def test_what_starts_needs_no_network_and_is_a_command_that_exists(stages: list[list[tuple[str, str]]]) -> None:
    last = stages[-1]
    assert json.loads(values(last, "ENTRYPOINT")[0]) == ["casewise"]
    (start,) = (json.loads(rest) for rest in values(last, "CMD"))
    assert all("://" not in word for word in start)
    settings = " ".join(values(last, "ENV"))
    assert "HF_HUB_OFFLINE=1" in settings
    assert "RAY_USAGE_STATS_ENABLED=0" in settings
    assert "serve" in COMMANDS


def test_health_is_asked_on_this_machine_with_code_that_parses(stages: list[list[tuple[str, str]]]) -> None:
    (check,) = values(stages[-1], "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "healthcheck", "exec")
    assert "127.0.0.1" in command[2]
    assert "/health/ready" in command[2]
    assert values(stages[-1], "EXPOSE") == ["8000"]


def test_cpu_or_cuda_is_one_build_argument_and_weights_are_mounted(stages: list[list[tuple[str, str]]]) -> None:
    assert any(argument.startswith("TORCH_INDEX=") for argument in values(stages[0], "ARG"))
    assert "/models" in json.loads(values(stages[-1], "VOLUME")[0])
    assert all(source.startswith("--from=build") for source in values(stages[-1], "COPY"))


def test_every_copied_file_exists_and_is_let_through_and_nothing_else_is(stages: list[list[tuple[str, str]]]) -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    copied = {name for rest in values(stages[0], "COPY") for name in rest.split()[:-1]}
    assert rules[0] == "*"
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in rules
    assert not any(fnmatch("weights.pth", rule.removeprefix("!")) for rule in rules if rule.startswith("!"))
