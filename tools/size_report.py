"""Print how long the functions and files of each package are, and fail where one is over the limit.

A function is measured from its `def` to its last line, docstring included. A kernel is a function under a `jit`
decorator; a file that holds one is a kernel file.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FUNCTION_LIMIT, KERNEL_LIMIT = 80, 200
FILE_LIMIT, KERNEL_FILE_LIMIT = 400, 600
ROOTS = ("rille", "tests", "tools", "benchmarks")
IMPORT_RUNS = 5


@dataclass(frozen=True)
class Function:
    where: str  # path:line name
    lines: int
    is_kernel: bool

    @property
    def limit(self) -> int:
        return KERNEL_LIMIT if self.is_kernel else FUNCTION_LIMIT


@dataclass(frozen=True)
class File:
    path: str  # relative to the repository
    lines: int
    functions: tuple[Function, ...]

    @property
    def limit(self) -> int:
        return KERNEL_FILE_LIMIT if any(function.is_kernel for function in self.functions) else FILE_LIMIT

    @property
    def package(self) -> str:
        folder = Path(self.path).parent.parts
        return "/".join(folder[:2])


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is `jit` of Triton or Gluon, called or not, however it was imported."""
    targets = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return any(ast.unparse(target).rpartition(".")[2] == "jit" for target in targets)


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None, "ast.parse gives every node its end"
    return node.end_lineno - node.lineno + 1


def measure(path: str, source: str) -> File:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = (Function(f"{path}:{node.lineno} {node.name}", length(node), is_kernel(node)) for node in nodes)
    return File(path, len(source.splitlines()), tuple(functions))


def measure_tree(top: Path) -> list[File]:
    paths = sorted(path for root in ROOTS for path in (top / root).rglob("*.py"))
    return [measure(path.relative_to(top).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def over_limit(files: Sequence[File]) -> Iterator[str]:
    for file in files:
        if file.lines > file.limit:
            yield f"{file.path}: {file.lines} lines, the limit is {file.limit}"
        for function in file.functions:
            if function.lines > function.limit:
                yield f"{function.where}: {function.lines} lines, the limit is {function.limit}"


def percentile(lengths: Sequence[int], percent: int) -> int:
    """The smallest length that at least `percent` of a hundred do not exceed."""
    return sorted(lengths)[-(-len(lengths) * percent // 100) - 1] if lengths else 0


def row(name: str, files: Sequence[File]) -> str:
    functions = [function.lines for file in files for function in file.functions]
    lengths = [file.lines for file in files]
    median, most, longest_function = (percentile(functions, percent) for percent in (50, 90, 100))
    return (
        f"{name:<20} {len(files):>5} {sum(lengths):>7} {percentile(lengths, 50):>6} {max(lengths):>5}"
        f" {len(functions):>9} {median:>6} {most:>4} {longest_function:>5}"
    )


def table(files: Sequence[File]) -> Iterator[str]:
    yield f"{'':<34} {'file length':>12} {'function length':>26}"
    yield "                     files   lines median   max functions median  p90   max"
    for package in sorted({file.package for file in files}):
        yield row(package, [file for file in files if file.package == package])
    library = [file for file in files if file.path.startswith("rille/")]
    if library:
        yield row("rille, whole", library)


def longest(files: Sequence[File], count: int = 5) -> Iterator[str]:
    functions = [function for file in files for function in file.functions]
    yield "longest functions"
    for function in sorted(functions, key=lambda each: -each.lines)[:count]:
        yield f"{function.lines:>6}  {function.where}"
    yield "longest files"
    for file in sorted(files, key=lambda each: -each.lines)[:count]:
        yield f"{file.lines:>6}  {file.path}"


def import_seconds(top: Path, module: str) -> float:
    """The best of a few fresh interpreters, their own start not counted."""
    code = f"from time import perf_counter as now; t = now(); import {module}; print(now() - t)"
    environment = {**os.environ, "PYTHONPATH": str(top)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(IMPORT_RUNS)
    ]
    return min(float(run.stdout) for run in runs)


def main() -> int:
    top = Path(__file__).resolve().parent.parent
    files = measure_tree(top)
    print(*table(files), "", *longest(files), "", sep="\n")
    for module in ("rille", "rille.cli"):
        if (top / module.replace(".", "/")).with_suffix(".py").exists() or module == "rille":
            print(f"import {module}: {import_seconds(top, module):.3f} s (best of {IMPORT_RUNS}; the aim is under 0.2)")
    problems = list(over_limit(files))
    for problem in problems:
        print(f"too long: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
