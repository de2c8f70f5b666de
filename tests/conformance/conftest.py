"""What holds for tests of the suite and of the command line."""

import pytest


@pytest.fixture(autouse=True)
def lines_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests look for words in lines; the widths are a test of their own."""
    monkeypatch.setenv("COLUMNS", "400")
