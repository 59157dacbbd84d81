"""The blocks of code in README and in the pages of docs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(page for page in ROOT.glob("docs/**/*.md") if "include}" not in page.read_text()),
]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"# (\w+\.py)\n")
COMMANDS = ("make", "pip", "python", "python3", "sdp", "KERAS_BACKEND")


class Block(NamedTuple):
    """A block of code of a page, which is named as tests name it."""

    page: str
    language: str
    text: str

    @property
    def program(self) -> str | None:
        """The name that its first line gives it, if it is a whole program."""
        found = PROGRAM.match(self.text)
        return found[1] if found else None


def blocks() -> list[Block]:
    """All of them."""
    return [
        Block(str(page.relative_to(ROOT)), language, text)
        for page in PAGES
        for language, text in BLOCK.findall(page.read_text())
    ]


def commands() -> list[tuple[str, list[str]]]:
    """The command lines of all pages: the page, and the words, without variables before them."""
    found = []
    for block in blocks():
        if block.language in ("", "sh", "bash", "console"):
            text = block.text.replace("\\\n", " ").replace("&&", "\n")
            for line in text.splitlines():
                words = re.split(r"[ =]", line.strip().removeprefix("$ "))
                if words[0] in COMMANDS and not line.startswith("sdp run: "):  # its output
                    found.append((block.page, _words(line)))
    return found


def _words(line: str) -> list[str]:
    words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    while "=" in words[0]:
        del words[0]
    return words
