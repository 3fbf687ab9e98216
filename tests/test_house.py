"""The rooms of the package: imports point one way, files and classes stay small, and few files know torch.distributed
or Lightning."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import lightning_sparsecomm

PACKAGE = "lightning_sparsecomm"
ROOT = Path(lightning_sparsecomm.__file__).parent

# From the lowest to the highest. `testing` and the package's own __init__ are above all rooms.
ROOMS = [
    "kernels",
    "basis",
    "codecs",
    "exchange",
    "channel",
    "sharing",
    "run",
    "elastic",
    "methods",
    "planning",
    "report",
    "frontends",
    "strategies",
]
ABOVE = ["commands", "testing", "versions", "__init__", "__main__"]

LONGEST_MODULE, LONGEST_CLASS = 300, 200

# Exceptions: docs/decisions.md gives the reasons, in a table whose first column is a file or a class.
DECISIONS = (ROOT.parent / "docs" / "decisions.md").read_text(encoding="utf-8")
EXCEPTIONS = re.findall(r"^\| `([\w/.]+)` \| \d+ \| .{20,} \|$", DECISIONS, re.MULTILINE)

# Imports that point upwards, with the reason.
UPWARDS = {
    (f"{PACKAGE}.run.agreement", PACKAGE): "the version of the package, which ranks must have in common",
}

LIGHTNINGS = {"lightning", "pytorch_lightning", "lightning_fabric"}


def path_of(module: str) -> Path:
    parts = module.split(".")[1:]
    folder = ROOT.joinpath(*parts)
    package = folder / "__init__.py"
    return package if package.exists() else folder.with_suffix(".py")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


MODULES = sorted(name_of(path) for path in ROOT.rglob("*.py"))


@lru_cache
def parsed(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def imports(module: str, at_import: bool = False) -> Iterator[str]:
    """All modules that a module imports, at its top or in functions, for types or at run time.

    Args:
        module: The module that imports.
        at_import: Only imports that run when the module is imported.
    """
    for node in _nodes(parsed(module), at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


def _nodes(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if at_import and (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_for_types(node)):
            continue
        yield node
        yield from _nodes(node, at_import)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def own_imports(module: str, at_import: bool = False) -> list[str]:
    return [name for name in imports(module, at_import) if name.split(".")[0] == PACKAGE]


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_the_walk_finds_all_kinds_of_imports() -> None:
    """A walk that finds nothing would let everything pass."""
    assert len(MODULES) > 50
    assert "torch.distributed" in set(imports(f"{PACKAGE}.basis.wire"))
    assert "pytorch_lightning" in set(imports(f"{PACKAGE}.frontends.trainer"))
    assert "pytorch_lightning" not in set(imports(f"{PACKAGE}.frontends.trainer", at_import=True))
    assert f"{PACKAGE}.kernels.updates.cpu" in own_imports(f"{PACKAGE}.kernels")
    assert f"{PACKAGE}.kernels.updates.cpu" not in own_imports(f"{PACKAGE}.kernels", at_import=True)
    assert f"{PACKAGE}.methods" in own_imports(f"{PACKAGE}.frontends.mixin")


def test_every_module_is_in_a_known_room() -> None:
    assert {room_of(module) for module in MODULES} - {*ROOMS, *ABOVE} == set()


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down(room: str) -> None:
    """A room imports from itself and from lower rooms only, for types too."""
    allowed = ROOMS[: ROOMS.index(room) + 1]
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        if room_of(module) == room
        for imported in own_imports(module)
        if room_of(imported) not in allowed and (module, imported) not in UPWARDS
    ]
    assert not wrong


def test_exceptions_are_still_needed() -> None:
    assert all(imported in own_imports(module) for module, imported in UPWARDS)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Whoever imports a module has all of it. A package's `__init__` counts as what it re-exports."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        if module in finished:
            return
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        path.append(module)
        for imported in own_imports(module):
            if (module, imported) not in UPWARDS:
                visit(imported)
        path.pop()
        finished.add(module)

    for module in MODULES:
        visit(module)
    assert finished == set(MODULES)


def lines_of(module: str) -> int:
    return len(path_of(module).read_text(encoding="utf-8").splitlines())


def classes() -> Iterator[tuple[str, int]]:
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                assert node.end_lineno is not None
                yield node.name, node.end_lineno - first + 1


def test_modules_stay_small() -> None:
    large = {str(path_of(each).relative_to(ROOT)) for each in MODULES if lines_of(each) > LONGEST_MODULE}
    assert large == {each for each in EXCEPTIONS if each.endswith(".py")}


def test_classes_stay_small() -> None:
    large = {name for name, lines in classes() if lines > LONGEST_CLASS}
    assert large == {each for each in EXCEPTIONS if not each.endswith(".py")}


def test_only_the_wire_and_what_starts_ranks_know_torch_distributed() -> None:
    knowing = {module for module in MODULES for name in imports(module) if f"{name}.".startswith("torch.distributed.")}
    basis = {f"{PACKAGE}.basis.{name}" for name in ("groups", "wire", "launched")}
    assert knowing == basis | {f"{PACKAGE}.testing.ranks"}


def test_only_the_front_ends_and_a_training_for_the_laws_know_lightning() -> None:
    knowing = {module for module in MODULES for name in imports(module) if name.split(".")[0] in LIGHTNINGS}
    assert {room_of(module) for module in knowing - {f"{PACKAGE}.testing.methods"}} == {"frontends", "strategies"}
