"""Rules over the source: imports point down, methods have no names outside losses, nothing unsafe, sizes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pspo import losses

PACKAGE = Path(__file__).parents[1] / "pspo"
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
ROOMS = (  # from the lowest: a room may import itself and the lower ones
    {"distributed"},
    {"hub"},
    {"losses", "tasks"},
    {"model"},
    {"rollout"},
    {"environments", "engines"},
    {"config"},  # its fields are types from below; model and rollout name it in annotations alone
    {"optimizers"},
    {"update"},
    {"run"},
    {"train"},
    {"evaluate", "sweep", "report", "export", "__main__"},
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
ALGORITHM = ("train.py", "update.py", "losses/", "rollout/", "model/")

every_file = pytest.mark.parametrize("name", FILES)


def room_of(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported, `pspo.model` for `from pspo import model`; not those under TYPE_CHECKING."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        assert tree.level == 0, "relative import"
        yield from (f"pspo.{alias.name}" for alias in tree.names) if tree.module == "pspo" else (tree.module,)
    for child in ast.iter_child_nodes(tree):
        yield from imported(child)


@every_file
def test_imports_point_down(name):
    room = room_of(name)
    for module in imported(TREES[name]):
        if module.startswith("pspo.") and module != "pspo.__version__":
            target = module.split(".")[1]
            assert target == room or RANK[target] < RANK[room], f"pspo/{name} imports {module}"


def test_losses_know_nothing_of_models():
    for name in FILES:
        if room_of(name) == "losses":
            packages = {module.partition(".")[0] for module in imported(TREES[name])}
            assert not packages & {"transformers", "datasets", "jsonargparse"}, name


@every_file
def test_no_branch_on_a_method_outside_losses(name):
    """But for the default in config.py, and the pictures and tables of a report, which name methods."""
    room = room_of(name)
    if room == "losses":
        return
    methods = {surrogate.__name__ for surrogate in losses.Surrogate.__subclasses__() if "pspo." in surrogate.__module__}
    assert {"PSPO", "Clip"} <= methods
    word = re.compile(rf"\b({'|'.join(sorted(methods))})\b")
    documentation = {node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Expr)}
    named = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            assert "surrogate" not in ast.unparse(node).lower()
        if isinstance(node, ast.Name | ast.Attribute):
            named += word.findall(getattr(node, "id", getattr(node, "attr", "")))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            named += word.findall(node.value)
    assert room == "report" or set(named) <= ({"PSPO"} if room == "config" else set())


@every_file
def test_nothing_unsafe(name):
    assert not {module.partition(".")[0] for module in imported(TREES[name])} & {"pickle", "marshal", "shelve"}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call):
            function, code = ast.unparse(node.func), ast.unparse(node)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name != "tasks/sandbox.py":  # a process of its own, without rights
                assert function not in ("eval", "exec", "compile", "os.system"), code
            assert function != "torch.load" or keywords.get("weights_only") == "True", code
            assert not {"shell", "allow_pickle"} & keywords.keys(), code


def lines(name: str) -> int:
    return len(FILES[name].read_text(encoding="utf-8").splitlines())


def test_sizes():
    (train,) = (n for n in TREES["train.py"].body if isinstance(n, ast.FunctionDef) and n.name == "train")
    assert train.end_lineno - train.lineno + 1 <= 40
    assert {name for name in FILES if "/" not in name} - {"__init__.py", "__main__.py"} == {
        "train.py", "update.py", "config.py",
    }  # fmt: skip
    assert sum(lines(name) for name in FILES if name.startswith(ALGORITHM)) <= 2500
