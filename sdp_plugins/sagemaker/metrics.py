"""`metric_definitions`: the numbers that SageMaker finds in a job's output for CloudWatch."""

from __future__ import annotations

import re
from collections.abc import Sequence

HINT = '[{"Name": "test:accuracy", "Regex": r"test_accuracy=(\\S+);"}]'
MOST_DEFINITIONS, LONGEST_NAME, LONGEST_REGEX = 40, 255, 500  # those of SageMaker


class Metrics:
    """The values of one job.

    Args:
        definitions: The estimator's argument; None: no metrics.

    Attributes:
        values: The values of each metric, in the order of the output.

    Raises:
        ValueError: SageMaker could not use a definition.
    """

    def __init__(self, definitions: object = None) -> None:
        self.regexes = _compiled(definitions)
        self.values: dict[str, list[float]] = {name: [] for name, _ in self.regexes}
        self._wrong: dict[str, list[str]] = {name: [] for name, _ in self.regexes}

    def read(self, line: str) -> None:
        """Look for values in a line of the job's output."""
        for name, regex in self.regexes:
            for match in regex.finditer(line):
                try:
                    self.values[name].append(float(match[1] or ""))
                except ValueError:
                    self._wrong[name].append(match[1] or "")

    def summary(self) -> list[str]:
        """A line for each metric."""
        return [f"metric {name!r}: {self._said(name)}" for name in self.values]

    def _said(self, name: str) -> str:
        values, wrong = self.values[name], self._wrong[name]
        if not values and not wrong:
            return "no line of the output matched"
        counted = f"last value {values[-1]}, {len(values)} in all" if values else "no value"
        if not wrong:
            return counted
        return f"{counted}; {len(wrong)} matches are not numbers, such as {wrong[-1]!r}"


def _compiled(definitions: object) -> list[tuple[str, re.Pattern[str]]]:
    if definitions is None:
        return []
    if not isinstance(definitions, Sequence) or isinstance(definitions, str):
        raise ValueError(f"metric_definitions must be a list. Hint: {HINT}")
    if len(definitions) > MOST_DEFINITIONS:
        raise ValueError(f"metric_definitions: SageMaker takes {MOST_DEFINITIONS} at most")
    return [_definition(given) for given in definitions]


def _definition(given: object) -> tuple[str, re.Pattern[str]]:
    if not isinstance(given, dict) or {*given} != {"Name", "Regex"}:
        raise ValueError(f"metric_definitions: {given!r} must have Name and Regex. Hint: {HINT}")
    name, text = given["Name"], given["Regex"]
    for value, longest in ((name, LONGEST_NAME), (text, LONGEST_REGEX)):
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise ValueError(f"metric_definitions: {value!r} must have 1 to {longest} characters")
    try:
        regex = re.compile(text)
    except re.error as error:
        raise ValueError(f"metric {name!r}: Regex {text!r} cannot be used: {error}") from None
    if not regex.groups:
        raise ValueError(
            f"metric {name!r}: Regex {text!r} has no group for the value. Hint: {HINT}"
        )
    return name, regex
