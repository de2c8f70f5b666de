"""Idioms that cost a reader more than they save: text multiplied by a condition, and names that say nothing.

`python -m tests.architecture.test_idioms` writes the ceilings of today, of which none may rise.
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("f8emu", "reference") for path in (ROOT / folder).rglob("*.py"))


def multiplied_conditions(source: str) -> list[int]:
    """The lines in which text, a list or a tuple is multiplied by a condition."""

    def is_text(node: ast.expr) -> bool:
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return is_string or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)

    def is_condition(node: ast.expr) -> bool:
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        is_bool = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
        return is_not or is_bool or isinstance(node, ast.Compare | ast.BoolOp)

    products = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.BinOp)]
    return [
        node.lineno
        for node in products
        if isinstance(node.op, ast.Mult)
        and ((is_text(node.left) and is_condition(node.right)) or (is_condition(node.left) and is_text(node.right)))
    ]


def test_no_text_is_multiplied_by_a_condition() -> None:
    products = {
        str(path.relative_to(ROOT)): lines for path in SOURCES if (lines := multiplied_conditions(path.read_text()))
    }
    assert not products


def test_the_rule_finds_what_it_forbids() -> None:
    assert multiplied_conditions("a = 's' * (n != 1)\nb = [x] * bool(y)\nc = (not z) * f'{z}'") == [1, 2, 3]
    assert multiplied_conditions("a = 's' * n\nb = [0] * len(y)\nc = 2 * (x == y)") == []


# Names without content

EMPTY_NAMES = {"found", "one", "told", "said", "given", "own"}
CEILINGS = Path(__file__).with_name("empty_names.txt")
"""A room and the most that it may have; a room that is not there has none."""


def empty_names(source: str) -> int:
    """The uses of variables and arguments that are named for nothing that they hold."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return sum(name in EMPTY_NAMES for name in [*names, *(node.arg for node in nodes if isinstance(node, ast.arg))])


def empty_names_by_room() -> dict[str, int]:
    """Rooms are folders of the second level; files beside them are a room together."""
    rooms: Counter[str] = Counter()
    for folder in ("f8emu", "reference", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT).parent.parts
            rooms["/".join(place[:2])] += empty_names(path.read_text())
    return {room: count for room, count in sorted(rooms.items()) if count}


def ceilings() -> dict[str, int]:
    lines = (line.split() for line in CEILINGS.read_text().splitlines())
    return {room: int(most) for room, most in lines}


def test_names_say_what_they_hold() -> None:
    most = ceilings()
    above = {room: count for room, count in empty_names_by_room().items() if count > most.get(room, 0)}
    assert not above, "name locals and arguments for what they hold, not found, one, told, said, given or own"


def test_a_name_without_content_is_counted() -> None:
    assert empty_names("def f(given, *, one=1):\n    found = given\n    return x.found, f(own=3)") == 4
    assert empty_names("findings = [owner.one for owner in says]") == 0


if __name__ == "__main__":
    known = ceilings() if CEILINGS.exists() else {}
    today = {room: min(count, known.get(room, count)) for room, count in empty_names_by_room().items()}
    CEILINGS.write_text("".join(f"{room} {count}\n" for room, count in today.items()))
