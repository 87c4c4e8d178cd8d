"""Rules over the source: imports point one way, methods have no name outside losses, nothing unsafe is called."""

import ast
import importlib
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pspo"
FILES = sorted(PACKAGE.rglob("*.py"))
METHODS = {"Clip", "NoClip", "PSPO", "P3O", "SAPO", "TOPR"}

LEAVES = ("config", "losses", "tasks", "metrics", "distributed", "model", "rollout.types", "rollout.advantages")
EVERY_PART = {"config", "losses", "tasks", "metrics", "distributed", "model", "rollout", "checkpoint", "evaluate",
              "results", "card", "trackers", "resume", "update"}  # fmt: skip
ALLOWED = {  # DESIGN section 1; a leaf package may import itself, and commands read configuration and write metrics
    "losses": {"losses"},
    "tasks": {"tasks"},
    "config": set(),
    "metrics": set(),
    "distributed": set(),
    "linear": set(),
    "model": {"linear"},
    "rollout.types": set(),
    "rollout.advantages": set(),
    "rollout": {"rollout", "model"},
    "checkpoint": {"distributed"},
    "resume": {"checkpoint", "config", "distributed", "metrics", "model"},
    "results": {"metrics", "tasks"},
    "evaluate": {"rollout", "tasks", "model", "distributed", "config", "metrics", "results"},
    "update": {"config", "distributed", "losses", "model", "rollout"},
    "card": {"__version__", "config", "model", "results", "tasks"},
    "trackers": set(),
    "train": EVERY_PART,
    "sweep": {"config", "metrics", "workers"},
    "workers": {"metrics", "resume"},
    "shapes": set(),
    "plan": {"config", "model", "results", "shapes"},
    "report": {"runs", "tables", "figures", "metrics"},  # files alone: no model, no configuration classes
    "runs": {"metrics"},  # intervals
    "tables": {"runs"},
    "figures": {"losses", "metrics"},  # the paper's Figure 1 is drawn from the losses themselves
    "__init__": set(),
}
# Signatures in the configuration are types of other parts: classes and Literals, nothing that computes.
TYPES_ONLY = {"config": {"distributed", "losses", "rollout", "tasks"}, "model": {"config"}}


def name_of(file: Path) -> str:
    """The module below pspo: "train", "rollout.types", "losses" for its __init__."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def rule_of(module: str) -> set[str]:
    rule = ALLOWED.get(module, ALLOWED.get(module.partition(".")[0]))
    assert rule is not None, f"pspo.{module} is new: say in ALLOWED what it may import"
    return rule


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def type_checking_nodes(tree: ast.Module) -> set[ast.AST]:
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test).endswith(
        "TYPE_CHECKING")]  # fmt: skip
    return {inside for block in blocks for statement in block.body for inside in ast.walk(statement)}


def imports(file: Path) -> Iterator[tuple[str, str | None, bool]]:
    """(module, imported name or None, whether under TYPE_CHECKING) of every import, those in functions included."""
    tree = parsed(file)
    only_checked = type_checking_nodes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node in only_checked) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: relative import"
            yield from ((node.module, alias.name, node in only_checked) for alias in node.names)


def own_imports(file: Path) -> Iterator[tuple[str, str | None, bool]]:
    """The imports of pspo, as names below it: "rollout.types"; `from pspo import model` counts as "model"."""
    for module, name, only_checked in imports(file):
        if module == "pspo" and name is not None:
            yield name, None, only_checked
        elif module.startswith("pspo."):
            yield module.removeprefix("pspo."), name, only_checked
        else:
            assert module != "pspo", f"{file}: `import pspo` hides what is used"


def is_type(value: object) -> bool:
    return isinstance(value, type) or typing.get_origin(value) is typing.Literal


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_one_way(file):
    module = name_of(file)
    allowed = rule_of(module)
    for target, name, only_checked in own_imports(file):
        part = target.partition(".")[0]
        if part in allowed or target in allowed:
            continue
        assert part in TYPES_ONLY.get(module, ()), f"pspo.{module} must not import pspo.{target}"
        if module == "config":
            assert name is not None, f"pspo.{module} must import the types it needs from pspo.{target} by name"
            value = getattr(importlib.import_module(f"pspo.{target}"), name)
            assert is_type(value), f"pspo.{module} may import types from pspo.{target}, but {name} is none"
        else:
            assert only_checked, f"pspo.{module} must import pspo.{target} under TYPE_CHECKING"


def test_every_design_part_has_a_rule():
    assert set(LEAVES) < set(ALLOWED)
    for file in FILES:
        rule_of(name_of(file))


@pytest.mark.parametrize("file", [file for file in FILES if "losses" in file.parts], ids=name_of)
def test_losses_know_nothing_of_models_or_configuration(file):
    for module, _, _ in imports(file):
        assert module.partition(".")[0] not in ("transformers", "jsonargparse", "datasets"), module
        assert module.partition(".")[0] != "pspo" or module.startswith("pspo.losses"), module


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Strings that stand alone: they are documentation, whatever they name."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize("file", [file for file in FILES if "losses" not in file.parts], ids=name_of)
def test_no_method_is_named_outside_losses(file):
    tree = parsed(file)
    documentation = docstrings(tree)
    word = re.compile(rf"\b({'|'.join(sorted(METHODS))})\b")
    lower = {name.lower() for name in METHODS} - {"pspo"}  # the package's own name
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in METHODS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            found += word.findall(node.value)
            found += [node.value] if node.value in lower else []
    named = {
        "config": ["PSPO"],  # the default's factory
        "tables": ["Clip", "NoClip"],  # the baselines of the paired differences
    }
    if name_of(file) == "figures":  # Figure 1, each method in a label and as its class, and nowhere else
        assert sorted(found) == sorted([*METHODS, *METHODS])
    else:
        assert found == named.get(name_of(file), [])


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_branch_on_the_kind_of_surrogate_outside_losses(file):
    if "losses" in file.parts:
        return
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            assert "surrogate" not in ast.unparse(node).lower(), ast.unparse(node)
        if isinstance(node, ast.Compare | ast.MatchValue):
            assert "type(config.algorithm.surrogate)" not in ast.unparse(node), ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_unsafe(file):
    catch_alls = 0
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            assert function not in ("eval", "exec", "compile", "__import__", "os.system"), ast.unparse(node)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if function == "torch.load":
                assert keywords.get("weights_only") == "True", ast.unparse(node)
            assert keywords.get("shell") in (None, "False"), ast.unparse(node)
            assert keywords.get("allow_pickle") in (None, "False"), ast.unparse(node)
        elif isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{file.name}:{node.lineno}: bare except"
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            catch_alls += bool(caught & {"Exception", "BaseException"})
    # Users' rewards, a model maker's chat template and what a library makes of a model folder may raise anything.
    assert catch_alls == (name_of(file) in ("model", "rollout.generate", "tasks.rewards"))
    # What weights_only=True raises, and the base of a reader that knows a dozen names.
    modules = {module for module, name, _ in imports(file) if name not in ("Unpickler", "UnpicklingError")}
    assert not modules & {"pickle", "marshal", "shelve", "sympy"}
