"""Idioms that cost a reader more than the line that they save: text or a list multiplied by a condition."""

import ast
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
    found = {
        str(path.relative_to(ROOT)): lines for path in SOURCES if (lines := multiplied_conditions(path.read_text()))
    }
    assert not found


def test_the_rule_finds_what_it_forbids() -> None:
    assert multiplied_conditions("a = 's' * (n != 1)\nb = [x] * bool(y)\nc = (not z) * f'{z}'") == [1, 2, 3]
    assert multiplied_conditions("a = 's' * n\nb = [0] * len(y)\nc = 2 * (x == y)") == []
