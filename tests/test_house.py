"""The house rules of the code: who may import whom, what starts without torch, sizes, names, docstrings."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "headrace"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

SPOKEN = ("errors", "config", "hub", "ledger", "schedule.action")
FOR_EVERYONE = {"headrace", *(f"headrace.{name}" for name in SPOKEN)}
"""`headrace` itself for its version; the rest are the words that all components speak."""

PLAN = {"schedule", "machine", "planner"}
LOWER = PLAN | {"lanes", "memory"}
MIDDLE = LOWER | {"optim", "models", "data"}
UPPER = MIDDLE | {"pipeline", "checkpoint"}
MAY_IMPORT = {
    "__init__.py": set(),
    "errors.py": set(),
    "config.py": set(),
    "hub.py": set(),
    "ledger.py": set(),
    "schedule": set(),
    "machine": set(),
    "planner": {"schedule", "machine"},
    "lanes": {"machine"},
    "memory": {"schedule", "machine", "lanes"},
    "optim": LOWER,
    "models": LOWER,
    "data": LOWER,
    "pipeline": MIDDLE,
    "checkpoint": MIDDLE,
    "training": UPPER,
    "run": UPPER | {"training"},
    "cli": UPPER | {"training", "run"},
    "__main__.py": {"cli"},
}
"""Component -> the components below it that it may import."""

WITHOUT_TORCH = (
    "errors.py",
    "config.py",
    "hub.py",
    "ledger.py",
    "schedule/",
    "machine/",
    "planner/",
    "cli/main.py",
)
PLAN_COMMAND = ("cli/", "run/file.py", "run/plan.py", "run/directory.py")
"""Loaded by `headrace plan`, which asks torch only where its build can have an accelerator."""
FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "misc"}


def component(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imported modules, inside functions too; `from package import module` gives both."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_torch(path: Path) -> bool:
    return lies_in(path, WITHOUT_TORCH) or path.name == "config.py"


def lies_in(path: Path, places: tuple[str, ...]) -> bool:
    return path.relative_to(PACKAGE).as_posix().startswith(places)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_downwards(path):
    own = component(path)
    allowed = MAY_IMPORT[own] | {own}
    found = {name for name in imports(TREES[path]) if name.split(".")[0] == "headrace"} - FOR_EVERYONE
    wrong = sorted(name for name in found if name.split(".")[1] not in allowed)
    assert not wrong, f"{named(path)} imports {', '.join(wrong)}"


def test_only_the_version_is_imported_from_the_package_itself():
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "headrace":
                assert {alias.name for alias in node.names} == {"__version__"}, named(path)


@pytest.mark.parametrize("path", [path for path in FILES if without_torch(path)], ids=named)
def test_no_torch_is_named_where_none_may_be(path):
    assert not {name.split(".")[0] for name in imports(TREES[path])} & {"torch", "transformers"}


def test_nothing_that_a_plan_needs_loads_torch():
    modules = [module(path) for path in FILES if without_torch(path) or lies_in(path, PLAN_COMMAND)]
    code = f"import sys, {', '.join(['headrace', *modules])}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_public_names_never_hide_a_sub_package():
    import headrace

    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert not packages & set(headrace.__all__)
    assert set(headrace.__all__) <= set(dir(headrace))


def test_public_names_can_be_imported():
    import headrace

    for name in headrace.__all__:
        assert getattr(headrace, name).__doc__, name


@pytest.mark.parametrize("path", FILES, ids=named)
def test_public_names_have_docstrings_and_types(path):
    assert ast.get_docstring(TREES[path]) or not TREES[path].body, "a module says what it is for"
    for name, node in public(TREES[path]):
        assert ast.get_docstring(node), f"{name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            assert not list(untyped(node)), f"{name} lacks types for {', '.join(untyped(node))}"


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Functions, classes and their methods whose names don't begin with an underscore."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


def untyped(function: ast.FunctionDef) -> Iterator[str]:
    spec = function.args
    every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    for argument in filter(None, every):
        if argument.annotation is None and argument.arg not in ("self", "cls"):
            yield argument.arg
    if function.returns is None:
        yield "its result"


def test_functions_are_short():
    lengths = sorted(length(node) for tree in TREES.values() for node in functions(tree))
    assert median(lengths) <= 12
    assert lengths[len(lengths) * 95 // 100] <= 60
    assert lengths[-1] <= 120


@pytest.mark.parametrize("folder", ["headrace", "tests", "benchmarks", "examples"])
def test_files_are_read_in_one_sitting(folder):
    sizes = {named(path): path.read_text("utf-8").count("\n") for path in (ROOT / folder).rglob("*.py")}
    assert not {name: lines for name, lines in sizes.items() if lines > 400}


def test_names_say_what_a_thing_is():
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(PACKAGE).parts}
    for tree in TREES.values():
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        names |= {node.name for node in functions(tree)}
    assert not sorted(name for name in names if set(words(name)) & FORBIDDEN_NAMES)


def words(name: str) -> list[str]:
    """`fooBar_baz` -> foo, bar, baz."""
    spaced = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return spaced.split("_")


def test_nothing_is_left_to_do():
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplementedError")
    left = [named(path) for path in FILES for mark in marks if mark in path.read_text("utf-8")]
    assert not left
