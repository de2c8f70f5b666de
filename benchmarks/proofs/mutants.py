"""Seeded one-line mutants of f8emu: which of them the tests find.

    python -m benchmarks.proofs.mutants --json benchmarks/results/mutants.json
    python -m benchmarks.proofs.mutants --like benchmarks/results/mutants.json    those mutants in changed code

1. Draw: one expression of a function changes (`<` to `<=`, `and` to `or`, 3 to 4, `not x` to `x`). Kernels that a GPU
   alone runs are left out: their tests are the GPU's.
2. Map: the suite runs once. `sys.monitoring` (Python 3.12) notes which tests reach the line of a mutant.
3. Kill: each mutant gets a copy of the checkout and the quickest tests that reach it, for at most `--budget` seconds.

A mutant is *killed* if one of its tests fails that passes without it, *survives* if none does, and is *unreached* if no
test ran its line in the process of the test. `--like` looks the mutants of a result up by function and text of the
line, wherever the code is today, draws others for those that are gone, and tells which were killed and are not.
"""

import argparse
import ast
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from f8emu.environment import versions

ROOT = Path(__file__).parents[2]
MAP_VARIABLE = "F8EMU_MUTANTS_MAP"  # the folder of the map, for the processes of pytest
TESTS_OF_A_FUNCTION = 3  # cases of one parametrized test, so that others have their turn
MOST_SECONDS = 180  # a mutant that runs for longer hangs: killed
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One changed expression: `before` becomes `after`, in the `nth` place of its line where `before` stands."""

    path: str
    function: str
    line: str
    nth: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What is the same when the code has moved to another file."""
        return self.function, self.line, self.nth, self.after


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A mutant in today's file: the lines of its statement, and where the text stands in its own."""

    mutant: Mutant
    statement: int
    row: int
    begin: int
    end: int

    def source(self, root: Path) -> str:
        lines = (root / self.mutant.path).read_bytes().split(b"\n")
        text = lines[self.row - 1]
        lines[self.row - 1] = text[: self.begin] + self.mutant.after.encode() + text[self.end :]
        return b"\n".join(lines).decode()


def changed(node: ast.expr) -> ast.expr | None:
    """The expression with one change, or None: there is none for its kind."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=comparators) if type(operator) in OPERATORS:
            return ast.Compare(left, [OPERATORS[type(operator)]()], comparators)  # type: ignore[list-item]
        case ast.BoolOp(op=operator, values=values):
            return ast.BoolOp(OPERATORS[type(operator)](), values)  # type: ignore[arg-type]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            sides = (left, right)
            is_text = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in sides) or any(
                isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides
            )
            return None if is_text else ast.BinOp(left, OPERATORS[type(operator)](), right)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments, keywords=keywords):
            return ast.Call(ast.Name("max" if name == "min" else "min"), arguments, keywords)
    return None


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def expressions(node: ast.AST, function: str, statement: int, runs: bool) -> Iterator[tuple[ast.expr, str, int]]:
    """The expressions inside functions, each with the qualified name and the first line of its statement."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            is_function = not isinstance(node, ast.ClassDef)
            if not (is_function and is_kernel(node)):
                name = f"{function}.{node.name}".lstrip(".")
                for child in node.body:
                    yield from expressions(child, name, child.lineno, is_function)
            return
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return
        case ast.AnnAssign(value=value):
            if value:
                yield from expressions(value, function, statement, runs)
            return
        case ast.expr() if runs:
            yield node, function, statement
    for child in ast.iter_child_nodes(node):
        yield from expressions(child, function, child.lineno if isinstance(child, ast.stmt) else statement, runs)


def places_of(path: Path) -> Iterator[Place]:
    """All mutants of a file."""
    source = path.read_bytes()
    lines = source.split(b"\n")
    for node, function, statement in expressions(ast.parse(source), "", 0, runs=False):
        after = changed(node)
        if after is None or node.lineno != node.end_lineno or node.end_col_offset is None:
            continue
        text = lines[node.lineno - 1]
        before = text[node.col_offset : node.end_col_offset]
        mutant = Mutant(
            path=str(path.relative_to(ROOT)),
            function=function,
            line=text.decode().strip(),
            nth=text[: node.col_offset].count(before),
            before=before.decode(),
            after=f"({ast.unparse(ast.fix_missing_locations(after))})",
        )
        yield Place(mutant=mutant, statement=statement, row=node.lineno, begin=node.col_offset, end=node.end_col_offset)


def all_places() -> list[Place]:
    return [place for path in sorted((ROOT / "f8emu").rglob("*.py")) for place in places_of(path)]


# Map


class Monitor:
    """A plugin of pytest: which tests run the lines of mutants, and how long each test takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines: dict[str, dict[int, list[int]]] = json.loads((folder / "lines.json").read_text())
        self.lines = {path: {int(row): mutants for row, mutants in rows.items()} for path, rows in lines.items()}
        self.reached: set[int] = set()
        self.tests: dict[str, tuple[float, list[int]]] = {}
        monitoring = self.monitoring = vars(sys)["monitoring"]  # of Python 3.12
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self.note)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def note(self, code: Any, row: int) -> Any:
        mutants = self.lines.get(code.co_filename, {}).get(row)
        if mutants is None:
            return self.monitoring.DISABLE
        self.reached.update(mutants)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.reached, start = set(), time.perf_counter()
        result = yield
        self.tests[item.nodeid] = (time.perf_counter() - start, sorted(self.reached))
        return result

    def pytest_sessionfinish(self) -> None:
        (self.folder / f"tests-{os.getpid()}.json").write_text(json.dumps(self.tests))


def pytest_configure(config: pytest.Config) -> None:
    """Called where this module is given to pytest as a plugin, in its own process and in those of xdist."""
    if folder := os.environ.get(MAP_VARIABLE):
        config.pluginmanager.register(Monitor(Path(folder)))


def reached_by(places: Sequence[Place], jobs: int, seconds: float, pytest_arguments: Sequence[str]) -> Any:
    """For each mutant its tests and their seconds, quickest first; and the tests that fail without a mutant."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, place in enumerate(places):
            for row in {place.statement, place.row}:
                lines[str(ROOT / place.mutant.path)][row].append(index)
        (folder / "lines.json").write_text(json.dumps(lines))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.proofs.mutants", "-p", "no:cacheprovider"]
        command += ["-n", str(jobs), "--dist", "worksteal", "--tb=no", "-rfE", *pytest_arguments]
        environment = {**os.environ, MAP_VARIABLE: name}
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"the suite did not end within {seconds:.0f} s") from error
        print(
            "\n".join(line for line in run.stdout.splitlines() if re.match("FAILED|ERROR|.* passed", line)), flush=True
        )
        if run.returncode not in (0, 1):  # 1: tests fail, whose mutants others may find
            raise SystemExit(f"the suite did not run, status {run.returncode}: {run.stderr[-2000:]}")
        broken = {line.split(" ")[1] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))}
        tests: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for path in folder.glob("tests-*.json"):
            for test, (duration, mutants) in json.loads(path.read_text()).items():
                for mutant in mutants if test not in broken else []:
                    tests[mutant].append((duration, test))
    return {mutant: sorted(durations) for mutant, durations in tests.items()}


def chosen(tests: Sequence[tuple[float, str]], budget: float) -> list[str]:
    """The quickest tests within the budget, at least one, few of each parametrized function."""
    names: list[str] = []
    functions: Counter[str] = Counter()
    spent = 0.0
    for duration, test in tests:
        function = test.partition("[")[0]
        if names and (spent + duration > budget or functions[function] == TESTS_OF_A_FUNCTION):
            continue
        names.append(test)
        functions[function] += 1
        spent += duration
    return names


# Kill


def copy_of_checkout(folder: Path) -> Path:
    """What git tracks, and the native engine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if (ROOT / name).is_file()]
    for name in [*names, *(str(path.relative_to(ROOT)) for path in (ROOT / "f8emu/native").glob("*.so"))]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def judged_one(place: Place, tests: Sequence[str], checkout: Path) -> str:
    """A verdict: "killed", "survives", or "fails alone" where the tests fail without the mutant, too."""
    target = checkout / place.mutant.path
    original = target.read_text()
    target.write_text(place.source(ROOT))
    try:
        passes = do_pass(tests, checkout)
    finally:
        target.write_text(original)
    return "survives" if passes else "killed" if do_pass(tests, checkout) else "fails alone"


def do_pass(tests: Sequence[str], checkout: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join(map(str, (checkout, checkout / "reference")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def judged(places: Sequence[Place], tests: Mapping[int, Any], jobs: int, budget: float) -> list[str]:
    """A verdict for each mutant."""
    verdicts = ["unreached"] * len(places)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            free.put(copy_of_checkout(Path(name) / str(job)))

        def judge(index: int) -> None:
            if index not in tests:
                return
            checkout = free.get()
            try:
                verdicts[index] = judged_one(places[index], chosen(tests[index], budget), checkout)
            finally:
                free.put(checkout)
            print(f"{index:4} {verdicts[index]:11} {places[index].mutant.path}", flush=True)

        list(pool.map(judge, range(len(places))))
    return verdicts


def lost(recorded: Sequence[Any], places: Sequence[Place], verdicts: Sequence[str]) -> list[Any]:
    """The mutants that were killed when they were recorded and are not today."""
    killed = {tuple(entry["key"]) for entry in recorded if entry["verdict"] == "killed"}
    return [
        p.mutant for p, verdict in zip(places, verdicts, strict=True) if verdict != "killed" and p.mutant.key in killed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=55)
    parser.add_argument("--like", type=Path, help="a result: its mutants, where today's code still has them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests for a mutant")
    parser.add_argument("--map-seconds", type=float, default=3600.0, help="the most that the suite may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("tests", nargs="*", default=["tests"], help="arguments of pytest for the suite")
    arguments = parser.parse_args()
    recorded: list[Any] = json.loads(arguments.like.read_text())["mutants"] if arguments.like else []
    today = {place.mutant.key: place for place in all_places()}
    places = [today.pop(key) for entry in recorded if (key := tuple(entry["key"])) in today]
    print(f"{len(places)} of {len(recorded)} recorded mutants are there", flush=True)
    places += random.Random(arguments.seed).sample(list(today.values()), max(0, arguments.count - len(places)))
    tests = reached_by(places, arguments.jobs, arguments.map_seconds, arguments.tests)
    verdicts = judged(places, tests, arguments.jobs, arguments.budget)
    counts = Counter(verdicts)
    print(f"{len(places)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for mutant in (missing := lost(recorded, places, verdicts)):
        print(f"killed before, not now: {mutant}")
    if arguments.json:
        entries = [
            {"path": p.mutant.path, "key": p.mutant.key, "before": p.mutant.before, "verdict": verdict}
            for p, verdict in zip(places, verdicts, strict=True)
        ]
        head = {"command": " ".join(sys.argv), "machine": platform.machine(), "versions": versions(), "counts": counts}
        rows = ",\n".join(map(json.dumps, entries))
        arguments.json.write_text(json.dumps(head, indent=0)[:-2] + f',\n"mutants": [\n{rows}\n]\n}}\n')
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
