"""Links that leave docs/, and those to files of figures, lead to the repository: relative links work in both places."""

import posixpath
import re
from typing import Any

# Not in code: neither fenced, nor indented, nor between backticks.
_LINK = re.compile(r"(?<!`)\]\(((?!https?:|#|mailto:)[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if path.startswith("docs/") and not path.endswith(".json"):
            return link[0]
        return f"]({config.repo_url}/blob/main/{path})"

    return _LINK.sub(outside, markdown)
