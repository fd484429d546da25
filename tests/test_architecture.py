"""Imports point one way, torch stays in its half, and code that decides cannot reach labels: one test for each rule.

Imports are read from the syntax trees: lazy ones, ``importlib.import_module("name")`` and addresses such as
``"casewise.run.ray:RayEngine"`` too. Rules about torch and labels follow them through every module on the way.
"""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import casewise

ROOT = Path(casewise.__file__).parent

# Each row may import the rows below it; names on one row may not import each other.
LAYERS = [
    {"cli"},
    {"serve", "monai"},
    {"bench"},
    {"fit"},
    {"deployment"},
    {"run"},
    {"report"},
    {"study"},
    {"guard", "replay", "render"},
    {"learn"},
    {"adapt", "judge"},
    {"measure", "data", "archive"},
    {"core"},
]
HEIGHT = {name: len(LAYERS) - row for row, names in enumerate(LAYERS) for name in names}
TORCH = {"torch", "nnunetv2", "monai", "transformers", "torchmetrics", "ray", "dynamic_network_architectures"}
MAY_IMPORT_TORCH = {"learn", "adapt", "guard", "deployment", "fit", "bench", "monai", "run", "serve"}
RUNS_ANYWHERE = {"core", "measure", "data", "archive", "judge", "replay", "render", "study", "report"}
WALLED = ("casewise.measure.metrics", "casewise.judge.outcomes", "casewise.data", "casewise.archive")
LOADERS = {  # the only files that import by a name they do not spell: registries of addresses and a user's own code
    "__init__.py", "cli/__init__.py", "cli/options.py", "adapt/backbones/module.py", "adapt/probes/__init__.py",
    "core/registry.py", "run/local.py",
    "adapt/backbones/architectures.py",  # which lists the classes of two installed libraries
}  # fmt: skip
NAMES_THAT_SAY_NOTHING = {
    "utils", "helpers", "misc", "common", "manager", "handler", "engine", "base", "found", "written", "reading",
    "words", "for_gate", "material", "facts", "described", "numbers", "doors", "choice", "finish",
}  # fmt: skip
ADDRESS = re.compile(r"(casewise(?:\.\w+)+)(?::\w+)?")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imports_of(module: str) -> frozenset[str]:
    """Everything that a module can import when it runs; what only a type checker reads does not run."""
    return frozenset(_imports(ast.parse(MODULES[module].read_text()), module))


def _imports(tree: ast.AST, module: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (at := ADDRESS.fullmatch(node.value)):
            yield at[1]
        elif isinstance(node, ast.Call) and _by_name(node) and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)
        yield from _imports(node, module)


def _by_name(call: ast.Call) -> bool:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return called in ("import_module", "__import__") and bool(call.args)


def reached_from(starts: Iterable[str]) -> dict[str, str]:
    """Every module that can be imported on the way, ours and others', with the module that imports it."""
    found: dict[str, str] = {}
    waiting = list(starts)
    while waiting:
        here = waiting.pop()
        for name in imports_of(here):
            for seen in (name, name.rpartition(".")[0]):  # "from package import module" and "from module import name"
                known = seen in MODULES or not seen.startswith("casewise")
                if seen and known and seen not in found:
                    found[seen] = here
                    if seen in MODULES and seen != "casewise":
                        waiting.append(seen)
    return found


def in_parts(parts: Iterable[str]) -> list[str]:
    return [module for module in MODULES if part_of(module) in parts]


def test_imports_point_downwards() -> None:
    wrong = []
    for module in in_parts(HEIGHT):
        here = part_of(module)
        for name in imports_of(module):
            there = part_of(name) if name.startswith("casewise.") else ""
            if there in HEIGHT and there != here and HEIGHT[there] >= HEIGHT[here]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_part_has_its_place_in_the_layers() -> None:
    parts = {part_of(module) for module in MODULES} - {"", "__main__"}
    assert parts <= set(HEIGHT), f"say in LAYERS, style.md and ARCHITECTURE.md where {parts - set(HEIGHT)} belong"


def test_torch_stays_in_its_half() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in in_parts(set(HEIGHT) - MAY_IMPORT_TORCH - {"cli"})
        for name in imports_of(module)
        if name.split(".")[0] in TORCH
    ]
    assert not wrong, "\n".join(wrong)


def test_replay_study_and_reports_reach_no_torch_through_anything() -> None:
    reached = reached_from(in_parts(RUNS_ANYWHERE))
    wrong = [f"{by} imports {name}" for name, by in reached.items() if name.split(".")[0] in TORCH]
    assert not wrong, "\n".join(wrong)


def test_a_controller_reaches_no_label_through_anything() -> None:
    reached = reached_from(module for module in MODULES if module.startswith("casewise.judge.controllers"))
    wrong = [f"{by} imports {name}" for name, by in reached.items() if name.startswith(WALLED)]
    assert not wrong, "\n".join(wrong)


def test_labels_and_gradients_meet_in_learn_only() -> None:
    """A module that makes gradients takes no label, except in ``learn``; what proposes or decides never reaches it."""
    wrong = [
        module
        for module in in_parts(set(HEIGHT) - {"learn"})
        if _makes_gradients(tree := ast.parse(MODULES[module].read_text())) and _arguments(tree) & LABELS
    ]
    assert not wrong, f"labels and gradients together: {wrong}"
    assert any(_makes_gradients(ast.parse(MODULES[m].read_text())) for m in in_parts({"learn"})), "the rule can fail"
    reached = reached_from(in_parts({"adapt", "judge", "guard", "replay"}))
    assert not [f"{by} imports {name}" for name, by in reached.items() if name.startswith("casewise.learn")]
    judged = reached_from(in_parts({"learn"}))
    assert not [f"{by} imports {name}" for name, by in judged.items() if name.startswith("casewise.judge")]


LABELS = {"label", "labels", "truth"}


def _makes_gradients(tree: ast.AST) -> bool:
    """Whether a module runs a backward pass or an optimizer."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("backward", "optim", "autograd") for node in ast.walk(tree)
    )


def _arguments(tree: ast.AST) -> set[str]:
    called = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {one.arg for args in called for one in [*args.args, *args.kwonlyargs, *args.posonlyargs]}


def test_statistics_know_no_study_and_no_analysis() -> None:
    """Numbers in, numbers out: an analysis asks statistics, never the other way round, not even through a helper."""
    reached = reached_from(module for module in MODULES if module.startswith("casewise.study.statistics"))
    above = ("casewise.study.study", "casewise.study.analyses", "casewise.study.finding")
    wrong = [f"{by} imports {name}" for name, by in reached.items() if name.startswith(above)]
    assert not wrong, "\n".join(wrong)


def test_pages_know_the_list_of_analyses_and_no_analysis() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in in_parts({"report", "run", "serve", "cli"})
        for name in imports_of(module)
        if name in MODULES and name.startswith("casewise.study.analyses.")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_study_is_known_to_analyses_only() -> None:
    """What analyses stand on (assignments, trajectories, findings) takes tables and can be tested without one."""
    below = ("finding", "assignment", "trajectories")
    reached = {one: imports_of(f"casewise.study.{one}") for one in below if f"casewise.study.{one}" in MODULES}
    wrong = [f"{one} imports {name}" for one, names in reached.items() for name in names if "study.study" in name]
    assert not wrong, "\n".join(wrong)


def test_nobody_asks_a_controller_for_its_name() -> None:
    """What a kind of controller is, it says itself (``metadata``): ``policy.controller == "router"`` is refused."""
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr == "controller"
        and any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in node.comparators)
    ]
    assert not wrong, f"ask metadata_of(controller_kind(policy)) instead: {wrong}"


def test_nothing_that_decides_has_an_argument_for_a_label() -> None:
    deciding = [name for name in MODULES if name.startswith(("casewise.judge.controllers", "casewise.guard"))]
    for module in deciding:
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = {a.arg for a in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]}
                assert not arguments & {"label", "labels", "truth", "gradient"}, f"{module}:{node.name}"


def test_only_loaders_import_by_a_name_that_they_do_not_spell() -> None:
    wrong = []
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            dynamic = isinstance(node, ast.Call) and _by_name(node) and not isinstance(node.args[0], ast.Constant)
            if dynamic and str(path.relative_to(ROOT)) not in LOADERS:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"imports whose target cannot be read: {wrong}"


def test_the_walk_follows_helpers_names_and_addresses() -> None:
    """The rules above can fail: a module that reaches torch by a lazy import, by name and by address is caught."""
    lazy = ast.parse("def f():\n    from casewise.adapt import episode\n    return episode")
    named = ast.parse("import importlib\nx = importlib.import_module('torch')")
    address = ast.parse("ENGINES = {'ray': 'casewise.run.ray:RayEngine'}")
    typed = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch")
    assert "casewise.adapt.episode" in set(_imports(lazy, "probe"))
    assert "torch" in set(_imports(named, "probe"))
    assert "casewise.run.ray" in set(_imports(address, "probe"))
    assert "torch" not in set(_imports(typed, "probe"))
    assert "torch" in reached_from(["casewise.guard"]), "guard imports it through adapt/episode.py"


def test_help_answers_in_half_a_second_and_imports_no_torch() -> None:
    probe = (
        "import sys, runpy; sys.argv = ['casewise', '--help']\n"
        "try: runpy.run_module('casewise', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'pandas' in sys.modules)"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "predict" in shown
    assert shown.strip().endswith("False False")
    assert min(times) < 0.5, "CPU seconds, so that a busy machine does not fail the test"


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(casewise, name) is not None for name in casewise.__all__)


def test_no_module_has_a_name_that_says_nothing() -> None:
    wrong = [str(path.relative_to(ROOT)) for path in MODULES.values() if path.stem in NAMES_THAT_SAY_NOTHING]
    assert not wrong, f"name them after their content: {wrong}"


def test_no_two_files_or_classes_share_a_name() -> None:
    """No two files outside the command line share a stem, and no two classes share a name."""
    stems = Counter(path.stem for path in MODULES.values() if path.parent.name != "cli" and path.stem != "__init__")
    classes = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in stems.items() if times > 1]
    assert not [name for name, times in classes.items() if times > 1]
