"""Writes llms.txt (https://llmstxt.org) at the site's root: every page of the navigation with its first sentence.

A hook of mkdocs, named in mkdocs.yml. It reads the pages as they were rendered.
"""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

_HIDDEN = re.compile(r'<(table|pre|details|figure)\b.*?</\1>|<a class="headerlink".*?</a>', re.DOTALL)
_PARAGRAPH = re.compile(r"<p[^>]*>(.*?)</p>", re.DOTALL)
_SENTENCE = re.compile(r".+?[.?!](?=\s|$)")
_sentences: dict[str, str] = {}
_navigation: list[Any] = []


def first_sentence(html: str) -> str:
    """The first sentence of the first paragraph that has words."""
    for paragraph in _PARAGRAPH.findall(_HIDDEN.sub("", html)):
        text = " ".join(unescape(re.sub(r"<[^>]+>", "", paragraph)).split())
        if text:
            found = _SENTENCE.match(text)
            return found[0] if found else text.removesuffix(":")
    return ""


def on_nav(nav: Any, **_: Any) -> None:
    """Keeps the navigation."""
    _navigation[:] = nav.items


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Keeps the first sentence of a page."""
    _sentences[page.url] = first_sentence(html)


def on_post_build(config: Any, **_: Any) -> None:
    """Writes the file."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    alone = [item for item in _navigation if item.is_page]
    for title, pages in [("Pages", alone), *((s.title, list(_pages(s))) for s in _navigation if s.is_section)]:
        lines += [f"## {title}", ""]
        lines += [f"- [{page.title}]({config.site_url or ''}{page.url}): {_sentences[page.url]}" for page in pages]
        lines.append("")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _pages(section: Any) -> Iterator[Any]:
    for item in section.children:
        yield from [item] if item.is_page else _pages(item)
