"""The figures of the documentation are those that the code draws, and follow the colour and the width of a page."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = spec_from_file_location("figures", ROOT / "docs" / "generate" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_figure_is_stale(figures: ModuleType) -> None:
    assert not figures.stale()


def test_a_change_is_noticed(figures: ModuleType, tmp_path: Path) -> None:
    for name, draw in figures.DRAWN.items():
        (tmp_path / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    assert not figures.stale(tmp_path)
    (tmp_path / "chips.svg").unlink()
    (tmp_path / "formats.svg").write_text("<svg/>", encoding="utf-8")
    assert figures.stale(tmp_path) == ["chips.svg", "formats.svg"]


def test_figures_read_at_420_pixels_in_light_and_dark(figures: ModuleType) -> None:
    for name in figures.DRAWN:
        text = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert set(re.findall(r'(?:fill|stroke|color)="([^"]+)"', text)) <= {"currentColor", "none", figures.ACCENT}
        assert min(map(float, re.findall(r'font-size="([\d.]+)"', text))) >= 9.5
        assert "\n\n" not in text, "a blank line ends an HTML block of markdown"
        for x in re.findall(r' x="([\d.]+)"', text):
            assert 0 <= float(x) <= figures.WIDTH


def test_every_figure_is_on_a_page(figures: ModuleType) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    shown = re.findall(r'--8<-- "docs/figures/([\w-]+)\.svg"', pages)
    assert figures.DRAWN.keys() <= set(shown)
