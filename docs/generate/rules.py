"""Links every rule id, as [ACC-2], to its rule in Numerics. A hook of mkdocs, named in mkdocs.yml.

It works on rendered pages, so that ids in docstrings become links too. Code stays as it is.
"""

import re
from typing import Any

NUMERICS = "numerics.md"
_CITED = re.compile(
    r"<(pre|code|a)\b.*?</\1>|(<p>)?\[((?:OP|ACC|CHAIN|CHIP|EPI|SPEC|BF16|PLAN|XLA|CAST|SCALE|MX)-\d+)\]",
    re.DOTALL,
)


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """A link where a rule is cited, an anchor where it is stated: at the begin of a paragraph of Numerics."""
    url = files.get_file_from_path(NUMERICS).url_relative_to(page.file)

    def linked(found: re.Match[str]) -> str:
        _, paragraph, rule = found.groups()
        if rule is None:
            return found[0]
        if paragraph and page.file.src_uri == NUMERICS:
            return f'{paragraph}<strong id="{rule.lower()}">[{rule}]</strong>'
        return f'{paragraph or ""}[<a href="{url}#{rule.lower()}">{rule}</a>]'

    return _CITED.sub(linked, html)
