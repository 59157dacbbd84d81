"""The manifests of the page on Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
MANIFESTS: dict[str, Any] = {
    name: yaml.safe_load(text)
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
}


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """What describes pods, in a manifest or a part of it."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from pods(part)


def only_container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return dict(container)


def command(name: str) -> list[str]:
    """The command of the first pod of a manifest."""
    return list(only_container(next(pods(MANIFESTS[name])))["command"])
