"""What the site needs beside the pages.

Links that leave docs/, and those to files of figures, lead to the repository: relative links work in both places.
Examples of docstrings, which begin with `>>>`, are shown as code.
"""

import posixpath
import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

# Not between backticks.
_LINK = re.compile(r"(?<!`)\]\(((?!https?:|#|mailto:)[^)\s]+)\)")

# After white space is normalized (30), before fenced blocks are found (25).
_PRIORITY = 28


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if path.startswith("docs/") and not path.endswith(".json"):
            return link[0]
        return f"]({config.repo_url}/blob/main/{path})"

    return _LINK.sub(outside, markdown)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Doctests())
    return config


class Doctests(Extension):
    """Fences each example, from its first `>>>` to the next empty line."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.preprocessors.register(_Fence(md), "doctests", _PRIORITY)


class _Fence(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        fenced: list[str] = []
        inside = False
        for line in lines:
            if not inside and line.startswith(">>> "):
                fenced.append("```pycon")
                inside = True
            elif inside and not line.strip():
                fenced.append("```")
                inside = False
            fenced.append(line)
        return [*fenced, "```"] if inside else fenced
