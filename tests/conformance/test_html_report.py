"""The page of `f8emu verify --html`, looked at by a browser: drawn, without an error, and nothing leaves the file."""

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from f8emu.conformance import load_subject, shipped_golden, verify
from f8emu.conformance.run import subject
from f8emu.conformance.run.result import DifferenceMap
from f8emu.report.charts import heat
from f8emu.report.figures import map_plot, runs, ticks
from f8emu.report.page import Cell, Page, Section, Share, Table, Text, render
from f8emu.report.verify import COMMAND, Run
from f8emu.report.verify import page as page_of
from tests.conformance.command import few_recorded, invoke
from tests.conformance.planted_gemm import never_promoting

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install chromium")
HOSTILE = "</script><script>document.title = 'stolen'</script><img src='https://example.com/x'>\"&planted"
"""The name of a subject."""


class Seen(NamedTuple):
    """What a browser makes of a page."""

    dom: str
    """After its scripts."""
    console: list[str]
    """Every message: errors of scripts, and what the policy forbade."""
    screenshot: Path


def looked_at(page: Path, *options: str) -> Seen:
    """At a quarter of the size."""
    assert CHROMIUM is not None
    picture = page.with_suffix(".png")
    quiet = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet.split(),
        "--enable-logging=stderr", f"--user-data-dir={page.with_suffix('.profile')}", "--virtual-time-budget=20000",
        "--window-size=1200,5600",
        "--hide-scrollbars", "--force-device-scale-factor=0.25", "--dump-dom", f"--screenshot={picture}", *options,
        page.as_uri(),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Seen(dom=run.stdout, console=re.findall(r":CONSOLE.*?\] (.*)", run.stderr), screenshot=picture)


def pixels_of(png: Path) -> np.ndarray:
    """[height, width, 3], 8 bits a channel."""
    with Image.open(png) as image:
        return np.asarray(image.convert("RGB"))


def count_of(pixels: np.ndarray, colour: str) -> int:
    """How many pixels have it."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((pixels == wanted).all(axis=-1).sum())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a subject whose promoted GEMMs are wrong, and whose name is hostile; recorded ones have NaN too."""
    folder = tmp_path_factory.mktemp("page")
    golden = folder / "few.safetensors"
    few_recorded(golden, *range(16))
    planted = replace(never_promoting(lambda out: out.shape == (64, 96)), name=HOSTILE, engine=HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(subject.SUBJECTS, "planted", lambda: planted)
        path = folder / "report.html"
        arguments = ["verify", "planted", "f8ref.numpy", "--golden", str(golden), "--stage", "golden"]
        status, _, error = invoke(*arguments, "--html", str(path))
    assert (status, error.strip()) == (1, "")
    return path


@needs_chromium
def test_browser_draws_every_figure_and_nothing_leaves_the_file(page: Path) -> None:
    style = "".join((files("f8emu.report") / f"{name}.css").read_text(encoding="utf-8") for name in ("page", "figure"))
    colours = {name: re.findall(rf"--{name}: (#\w+);", style) for name in re.findall(r"--([\w-]+): #", style)}
    for i, options in enumerate(((), ("--blink-settings=preferredColorScheme=0",))):
        seen = looked_at(page, *options)
        assert seen.console == []
        pixels = pixels_of(seen.screenshot)
        for colour in ("below", "above", "apart", "middle"):
            assert count_of(pixels, colours[colour][0]) > 40, colour
        assert count_of(pixels, colours["paper"][i]) > pixels[..., 0].size // 2
        assert "<title>Do the bits agree? 2 subjects - f8emu verify</title>" in seen.dom
        assert seen.dom.count('<svg class="plot"') == 1 + 6
        assert seen.dom.count('class="cell ') > 6, "cells of maps"
        bars = re.findall(r'class="(?:bar \w+|share-bar)"[^>]*><title>[^<]+ outputs?[^<]*</title>', seen.dom)
        assert len(bars) > 20, "each says its number to a pointer"
        shown = unescape(re.sub(r"<(script|style)\b.*?</\1>|<[^>]+>", " ", seen.dom, flags=re.DOTALL))
        assert HOSTILE in shown, "as text"
        assert "NOT EQUAL: " in shown and "equal in all 8 cases" not in shown


@needs_chromium
def test_the_page_forbids_what_it_did_not_write(page: Path, tmp_path: Path) -> None:
    """Were a name not escaped, the policy would stop it; and the console tells: the check above can fail."""
    injected = "<script>document.title = 'stolen'</script><img src='https://example.com/x.png' alt=''>"
    altered = tmp_path / "altered.html"
    altered.write_text(page.read_text(encoding="utf-8").replace("<main", injected + "<main"), encoding="utf-8")
    seen = looked_at(altered)
    assert "<title>Do the bits agree?" in seen.dom
    assert len(seen.console) == 2 and all("Content Security Policy" in line for line in seen.console), seen.console


@needs_chromium
def test_the_page_is_as_narrow_as_a_telephone(page: Path, tmp_path: Path) -> None:
    """Nothing is wider than 420 pixels, and no table scrolls; a script of our own, without the policy, measures.

    A window of Chromium's is 500 wide at least, and has the style of narrow screens.
    """
    tables = 'document.querySelectorAll("main .scroll:not(pre)")'
    script = f"""<script>
        document.body.style.width = "420px";
        const wide = [...{tables}].filter((x) => x.scrollWidth > x.clientWidth).length;
        const widths = ["main", "header"].map((x) => document.querySelector(x).scrollWidth);
        document.title = wide + " of " + {tables}.length + " too wide, " + Math.max(...widths);
    </script>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    altered = tmp_path / "measured.html"
    altered.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    found = re.search(r"<title>0 of (\d+) too wide, 420</title>", looked_at(altered, "--window-size=500,900").dom)
    assert found is not None and int(found[1]) > 3


def test_the_order_of_the_page(page: Path) -> None:
    """As on the terminal; figures make the page larger, and no larger than a mail may be."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"<h2 [^>]*>(.*?)</h2>", text)
    assert unescape(" ".join(titles)) == " ".join(
        [f"Diagnosis of {HOSTILE}", "Overview", HOSTILE, "f8ref.numpy", "One case again", "Machine and versions"]
    )
    parts = re.findall(r"<h3 [^>]*>(.*?)</h3>", text)
    assert parts[:3] == [
        "One output of each case that differs",
        "What ran",
        "What differs: recorded GEMMs",
    ]
    assert text.index('id="verdict"') < text.index("<h2 ")
    # What is wrong is told in tables, with bars: each case's output, and how much of each kind is explained.
    for heads in (
        ("expected", "found", "outputs of the case that differ"),
        ("by the chip's rules", "by this explanation"),
    ):
        assert all(f">{name}</th>" in unescape(text) for name in heads)
    fitted, again = re.findall(r"<pre [^>]*>(.*?)</pre>", text, re.DOTALL)
    assert "\nf8emu fit planted --kind " in fitted and "f8emu verify " in again and "torch._scaled_mm(" in again
    equal = verify([load_subject("f8ref.numpy")], stages=["golden"], golden=replace(shipped_golden(), cases=()))
    small = render(COMMAND, page_of(equal, Run(command=["f8emu"], seconds=0.0)))
    assert len(small) < 40_000 < len(text) < 600_000


def test_page_can_be_read_without_figures_and_colours(page: Path) -> None:
    text = re.sub(r"<style\b.*?</style>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(re.findall(r'<figure aria-labelledby="[^"]+"><figcaption><strong', text)) == 7
    assert len(re.findall(r'role="img" aria-label="[^"]{40,}"', text)) == 7
    assert "</span>different</td>" in text and "</span>equal</td>" in text
    assert text.count("<table>") == text.count("<caption>") >= 4
    assert "http:" not in text and text.count("https:") == unescape(text).count(HOSTILE), "of the hostile name alone"
    assert "<script" not in text


def test_helper_escapes_and_counts() -> None:
    table = Table(
        caption="<c>",
        columns=("<a>", "b"),
        rows=[["one", Cell(text="<x>", tone="bad", is_code=True)], ["", Share(value=0.25)], ["two", "y"]],
        numeric=frozenset((1,)),
    )
    part = Section(title="<t>", lead="<l>", blocks=[table, Text(points=("<p>", "q"))])
    text = render("f8emu test", Page(title="<title>", sections=[part, replace(part, title="second")]))
    assert not re.search(
        r"<(c|a|x|t|l|p)>", text.replace("<p>One file", "").replace("<p>The figures", "").replace("<p>&lt;", "")
    )
    assert text.count("<th scope=row>one</th>") == 2
    assert '<td data-label="b" class="number mono bad">' in text and 'style="width:25.00%"' in text and "25.0 %" in text
    assert text.count('href="#part-') == 2 and text.count('<section id="part-') == 2


def test_a_large_map_stays_small() -> None:
    """Noise in 16,384 cells, the most that a map has: six such maps and the rest stay below a megabyte."""
    r = np.random.default_rng(0)
    place = DifferenceMap(
        case="noise", part="", dtype="float32", shape=(128, 128), cell=(1, 1),
        differing=r.integers(0, 2, (128, 128)), farthest=r.integers(-(1 << 17), 1 << 17, (128, 128)),
        apart=r.random((128, 128)) < 0.01,
    )  # fmt: skip
    assert len(map_plot(place).svg) < 150_000


def test_runs_and_ticks() -> None:
    assert runs([True, True, False, True, False]) == [(0, 2), (3, 1)] and runs([]) == []
    assert ticks(0, 1, 4) == [0, 0.5, 1.0] and ticks(0, 95, 5) == [0, 20, 40, 60, 80] and ticks(3, 3, 5) == [3]


def test_a_long_name_keeps_its_end_and_tells_the_whole() -> None:
    names = [f"_fsdp_wrapped_module.model.layers.{i}.mlp.shared_expert.down_proj" for i in range(3)]
    svg = heat({name: [(1, 30.0)] for name in names}, good=40, bad=20, form=str).html("")
    for i, name in enumerate(names):
        assert f">\N{HORIZONTAL ELLIPSIS}{i}.mlp.shared_expert.down_proj<title>{name}</title></text>" in svg
    assert ">w1</text>" in heat({"w1": [(1, 30.0)]}, good=40, bad=20, form=str).html("")
