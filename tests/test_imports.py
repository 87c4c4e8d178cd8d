"""Rules over the source: imports point down, never in a circle; methods have no names outside losses."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pspo import losses

PACKAGE = Path(__file__).parents[1] / "pspo"
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
ROOMS = (  # from the lowest: a room may import itself and the lower ones
    {"__init__", "errors", "terminal"},
    {"signals", "token_table"},
    {"losses", "tasks"},
    {"distributed", "files"},
    {"config"},
    {"model"},
    {"rollout"},
    {"update"},
    {"environments"},
    {"endings", "inputs"},
    {"cli"},
    {"evaluate"},
    {"run"},
    {"train"},
    {"__main__"},
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}


def room_of(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported anywhere: in functions and under TYPE_CHECKING, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (module if file_of(module) else node.module for module in modules)


def file_of(module: str) -> str | None:
    """The file of one of our modules."""
    path = "/".join(module.split(".")[1:])
    names = f"{path}.py", f"{path}/__init__.py".lstrip("/")
    return next((name for name in names if name in FILES), None) if module.split(".")[0] == "pspo" else None


def test_imports_point_down_and_never_in_a_circle():
    files = {name: {file_of(module) for module in imported(TREES[name])} - {None} for name in FILES}
    for name, others in files.items():
        for other in others:
            importer, room = room_of(name), room_of(other)
            assert room == importer or RANK[room] < RANK[importer], f"{name} imports {other}"
    graphlib.TopologicalSorter(files).prepare()  # raises CycleError


def test_the_trainer_imports_none_of_the_other_packages():
    for name in FILES.keys() - {"__main__.py"}:
        packages = {module.partition(".")[0] for module in imported(TREES[name])}
        assert not packages & {"pspo_lab", "pspo_vllm", "pspo_bridge"}, name
        assert room_of(name) != "losses" or packages <= {"pspo", "torch", *sys.stdlib_module_names}, name


def test_the_bridge_imports_the_losses_and_what_a_run_records_alone():
    for file in (PACKAGE.parent / "pspo_bridge").glob("*.py"):
        modules = {module for module in imported(ast.parse(file.read_text())) if module.partition(".")[0] == "pspo"}
        assert {module.partition(".")[2].partition(".")[0] for module in modules} <= {"losses", "token_table"}, file


def test_no_branch_on_a_method_outside_losses():
    """But for the default in config.py."""
    methods = {surrogate.__name__ for surrogate in losses.Surrogate.__subclasses__() if "pspo." in surrogate.__module__}
    assert {"PSPO", "Clip"} <= methods
    word = re.compile(rf"\b({'|'.join(sorted(methods))})\b")
    for name in FILES:
        if room_of(name) == "losses":
            continue
        documentation = {node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Expr)}
        named = []
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Name | ast.Attribute):
                named += word.findall(getattr(node, "id", getattr(node, "attr", "")))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
                named += word.findall(node.value)
        assert set(named) <= ({"PSPO"} if name == "config.py" else set()), name


def test_nothing_unsafe():
    for name in FILES:
        assert not {module.partition(".")[0] for module in imported(TREES[name])} & {"marshal", "shelve"}
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Call):
                function, code = ast.unparse(node.func), ast.unparse(node)
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert function not in ("eval", "exec", "compile", "os.system", "pickle.load", "pickle.loads"), code
                assert function != "torch.load" or keywords.get("weights_only") == "True", code
                assert not {"shell", "allow_pickle"} & keywords.keys(), code


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import pspo",
        "import pspo.train",
        "from pspo import train; import pspo",
        "from pspo.train import main; import pspo; assert main is pspo.train.main",
    ],
)
def test_pspo_train_is_a_call_whatever_is_imported_first(imports):
    code = f"{imports}; import inspect; print(*inspect.signature(pspo.train).parameters, pspo.losses.PSPO.__name__)"
    words = run_python("-c", code).split()
    assert words[:2] + words[-2:] == ["model", "data", "on_rollout", "PSPO"]


@pytest.mark.slow
def test_the_package_loads_nothing_early():
    run_python("-c", "import sys, pspo; assert 'torch' not in sys.modules")
    assert "usage: " in run_python("-m", "pspo.train", "--help")


def run_python(*args: str) -> str:
    """What Python prints; it must not warn."""
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    assert not result.stderr
    return result.stdout
