"""The results of `gpu`: written anew after each part, so that a killed run keeps what it has."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import SCHEMA

WRONG = "WRONG"  # the first word of a remark on a wrong result


@dataclass
class Section:
    """The results of one part.

    Attributes:
        name: The part's name.
        title: What it measures.
        columns: The table's header.
        rows: The table's cells.
        remarks: Lines below the table.
        data: The numbers, for the JSON file.
        error: Why the part is missing or not complete.
        seconds: Its duration.
    """

    name: str
    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether something is wrong or missing."""
        return bool(self.error) or any(remark.startswith(WRONG) for remark in self.remarks)

    def to_markdown(self, limit: int | None = None) -> str:
        """Return the section as Markdown, with at most `limit` characters of the error."""
        lines = [f"## {self.name}: {self.title}"]
        if self.rows:
            numbers = [cell[:1] in "-0123456789" for cell in self.rows[0]]
            rule = tuple("---:" if number else "---" for number in numbers)
            lines += [_row(self.columns), _row(rule)]
            lines += [_row(cells) for cells in self.rows] + [""]
        lines += [f"- {remark}" for remark in self.remarks]
        if self.error:
            lines += ["", "**not complete:**", "```", self.error[:limit], "```"]
        return "\n".join([*lines, f"- this part took {self.seconds:.1f} s"]) + "\n"


@dataclass
class Document:
    """All sections, and the machine.

    Attributes:
        folder: Where the files are written.
        settings: The plan.
        machine: Facts about the machine.
        sections: The parts, in order.
    """

    folder: Path
    settings: dict[str, Any]
    machine: dict[str, Any]
    sections: list[Section] = field(default_factory=list)

    def find(self, name: str) -> dict[str, Any]:
        """Return the numbers of a part; none if it has not run."""
        return next((s.data for s in self.sections if s.name == name), {})

    def to_markdown(self) -> str:
        """Return everything as Markdown."""
        facts = [f"{name}: {value}" for name, value in self.machine.items()]
        head = ["# smddp on device tensors", *(f"- {fact}" for fact in facts), ""]
        return "\n".join([*head, *(section.to_markdown() for section in self.sections)])

    def write(self) -> None:
        """Write gpu.md and gpu.json; each is replaced at once."""
        data = {
            "schema": SCHEMA,
            "operation": "gpu",
            "settings": self.settings,
            "machine": self.machine,
            "sections": [asdict(section) for section in self.sections],
        }
        for name, text in (
            ("gpu.md", self.to_markdown()),
            ("gpu.json", json.dumps(data, indent=1) + "\n"),
        ):
            fresh = self.folder / f".{name}"
            fresh.write_text(text)
            os.replace(fresh, self.folder / name)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
