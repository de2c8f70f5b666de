"""Links every issue of another project, as owner/repo#12, to its thread on GitHub. A hook of mkdocs.

It works on rendered pages. Code and links stay as they are.
"""

import re
from typing import Any

_CITED = re.compile(r"<(pre|code|a)\b.*?</\1>|\b([\w.-]+/[\w.-]+)#(\d+)\b", re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """The page with its links. GitHub leads from /issues/ to a pull request of that number."""
    return _CITED.sub(_linked, html)


def _linked(cited: re.Match[str]) -> str:
    _, repository, number = cited.groups()
    if repository is None:
        return cited[0]
    return f'<a href="https://github.com/{repository}/issues/{number}">{cited[0]}</a>'
