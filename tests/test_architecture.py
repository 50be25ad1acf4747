"""The rules of docs/design.md that a program can check: which way imports run, how long things get, what is documented.

Reads the sources as text and never imports a heavy module, so that `make check` runs it in a second without pytest.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "octavo"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Who may import whom. `sampling.validate` stands with the leaves: it is the part of SamplingParams that checks it.
# `core.plan` stands by itself: it is what control plane and compute plane hand each other.
LEAVES = {"errors", "pooling", "config", "request", "sampling.validate"}
ARROWS = {
    "errors": set(),
    "pooling": {"errors"},
    "config": {"errors", "pooling"},
    "request": {"errors", "pooling", "sampling.validate"},
    "sampling.validate": {"errors", "request"},
    "core": LEAVES | {"core.plan"},
    "core.plan": LEAVES,
    "ops": LEAVES,
    "quant": LEAVES | {"ops"},
    "models": LEAVES | {"quant", "ops"},
    "checkpoint": LEAVES | {"models", "quant", "ops"},
    "text": LEAVES | {"checkpoint"},
    "sampling": LEAVES | {"core.plan", "ops"},
    "runtime": LEAVES | {"core", "core.plan", "sampling", "models", "quant", "ops", "checkpoint", "text"},
    "engine": LEAVES | {"core", "core.plan", "runtime", "sampling", "models", "quant", "ops", "checkpoint", "text"},
    "llm": LEAVES | {"engine", "text", "checkpoint"},
    "async_llm": LEAVES | {"engine", "text", "checkpoint"},
    "server": LEAVES | {"llm", "async_llm", "engine", "text", "checkpoint"},
    "cli": LEAVES
    | {"server", "llm", "async_llm", "engine", "core", "core.plan", "runtime", "models", "quant", "ops", "checkpoint"}
    | {"text"},
    "entrypoints": {"cli"},
}
# Beside the table: the root holds the public names and is a door to nothing else.
DOORS = {"__init__", "__main__"}


def test_imports_run_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {unit} imports {target}"
        for path in _sources()
        if (unit := _unit(_module(path))) not in DOORS
        for line, target in _octavo_imports(path)
        if target not in ARROWS[unit] | {unit}
    ]
    assert not wrong, "\n".join(wrong)


def test_core_imports_the_standard_library_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in (PACKAGE / "core").glob("*.py")
        for line, name in _imports(path)
        if name.partition(".")[0] not in sys.stdlib_module_names | {"octavo"}
    ]
    assert not wrong, "\n".join(wrong)


def test_only_config_reads_the_environment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: os.{node.attr}"
        for path in _sources()
        if path != PACKAGE / "config.py"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_hold_no_mutable_state() -> None:
    """No `global`, and no list, dict or set at module level unless its upper-case name says that it is a constant."""
    wrong = []
    for path in _sources():
        tree = _tree(path)
        nodes: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
        for statement in tree.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(
                statement.value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
            ):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                if any(not name.isupper() and name != "__all__" for name in names):
                    nodes.append(statement)
        wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in nodes]  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_public_names_are_sorted_and_complete() -> None:
    import octavo

    names = list(octavo.__all__)
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    promised = {
        alias.asname or alias.name
        for node in ast.walk(_tree(PACKAGE / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo.")
        for alias in node.names
    }
    assert set(names) == promised | {"__version__"}


def test_every_option_is_documented() -> None:
    from octavo import config

    wrong = [
        f"{cls.__name__}.{field.name}"
        for cls in (config.EngineConfig, config.ServerConfig)
        for field in dataclasses.fields(cls)
        if not field.metadata.get("help")
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [str(path.relative_to(ROOT)) for path in _sources() if not ast.get_docstring(_tree(path))]
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    files = [*_sources(), *_native()]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    wrong = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > MAX_FILE_LINES]
    assert not wrong, "\n".join(wrong)


def test_functions_are_short() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} has {length} lines"
        for path in [*_sources(), *_native()]
        for line, name, length in (_functions(path) if path.suffix == ".py" else _native_functions(path))
        if length > MAX_FUNCTION_LINES and not name.startswith("bind_")  # a binding is a list of declarations
    ]
    assert not wrong, "\n".join(wrong)


def test_every_op_has_a_reference_a_kernel_and_a_parity_case() -> None:
    api = next(
        node for node in _tree(PACKAGE / "ops" / "api.py").body if isinstance(node, ast.ClassDef) and node.name == "Ops"
    )
    ops = [node.name for node in api.body if isinstance(node, ast.FunctionDef)]
    assert ops
    places = {
        "reference": {name for _, name, _ in _functions(PACKAGE / "ops" / "reference.py")},
        "kernel": {name for _, name, _ in _functions(PACKAGE / "ops" / "cpu.py")},
        "parity case": _words(ROOT / "tests" / "ops" / "test_parity.py"),
    }
    wrong = [f"{op}: no {place}" for op in ops for place, words in places.items() if op not in words]
    assert not wrong, "\n".join(wrong)


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _native() -> list[Path]:
    return sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in (".h", ".cpp"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _module(path: Path) -> str:
    """Path below the package as a dotted name: core/plan.py is core.plan."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def _unit(module: str) -> str:
    """The row of ARROWS that a module (without the leading octavo.) belongs to."""
    return module if module in ARROWS else module.partition(".")[0]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also those inside functions and for type checkers. `from octavo.a import b` gives
    octavo.a.b: b may be a module."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _octavo_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, unit) of every import of one of octavo's own modules. The public names of the root, which is all that
    `import octavo` gives, count as no unit."""
    for line, name in _imports(path):
        package, _, module = name.partition(".")
        if package == "octavo" and module:
            parts = module.split(".")
            unit = next((u for u in (".".join(parts[:2]), parts[0]) if u in ARROWS), None)
            if unit is not None:
                yield line, unit


def _functions(path: Path) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines) of each function; the docstring, a declaration, is not counted."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


def _native_functions(path: Path) -> Iterator[tuple[int, str, int]]:
    """The same for C++ as clang-format leaves it: what begins in the first column, or inside a class in the third, ends
    with a brace in that column. (Loops in the third column count too; they are shorter than their function.)"""
    start: dict[int, tuple[int, str]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        column = len(line) - len(line.lstrip())
        if line.lstrip().startswith("}"):
            if column in start:
                first, text = start.pop(column)
                yield first, text.partition("(")[0].split()[-1], number - first + 1
        elif column in (0, 2) and "(" in line and not re.match(r" *(class|struct|namespace|//|#)", line):
            start[column] = (number, line)


def _words(path: Path) -> set[str]:
    """Every word in a file; none where there is no file."""
    return set(re.findall(r"\w+", path.read_text())) if path.exists() else set()


if __name__ == "__main__":
    for name, rule in list(globals().items()):
        if name.startswith("test_"):
            rule()
            print(f"{name[5:].replace('_', ' ')}: ok")
