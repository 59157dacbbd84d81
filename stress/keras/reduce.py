"""Smaller plans that may have the same difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from stress.keras.plan import Plan, Value


def reduced(plan: Plan, still_differs: Callable[[Plan], bool], tries: int) -> Plan:
    """Return the smallest plan found that still differs, within the given number of tries."""
    tried = {plan.to_json()}
    again = True
    while again:
        again = False
        for smaller in candidates(plan):
            if smaller.to_json() in tried:
                continue
            if not tries:
                return plan
            tries -= 1
            tried.add(smaller.to_json())
            if still_differs(smaller):
                plan, again = smaller, True
                break
    return plan


def candidates(plan: Plan) -> Iterator[Plan]:
    """Yield slightly smaller plans, the largest reductions first."""
    if len(plan.outputs) > 1:
        for output in plan.outputs:
            yield without_unused(replace(plan, outputs=(output,)))
    for name in ("evaluate", "predict"):
        if plan.fit[name]:
            yield with_fit(plan, **{name: False})
    if any(output.metrics for output in plan.outputs):
        yield replace(plan, outputs=tuple(replace(o, metrics=()) for o in plan.outputs))
    for place in range(len(plan.values) - 1, -1, -1):
        if (shorter := without_layer(plan, place)) is not None:
            yield shorter
    yield from _training(plan)
    for place, output in enumerate(plan.outputs):
        simple = replace(output, loss="MeanSquaredError", targets="real", activation=None,
                         options={}, metrics=(), sample_weight=False, weight=1.0)  # fmt: skip
        if simple != output:
            outputs = (*plan.outputs[:place], simple, *plan.outputs[place + 1 :])
            yield replace(plan, outputs=outputs)


def _training(plan: Plan) -> Iterator[Plan]:
    fit = plan.fit
    for name in ("validation_rows", "validation_split", "class_weight", "steps_per_execution",
                 "run_eagerly", "optimize_graph", "steps_per_epoch"):  # fmt: skip
        if name in fit and not (name == "steps_per_epoch" and fit["source"] == "generator"):
            yield with_fit(plan, **{name: None})
    if fit["source"] != "arrays":
        yield with_fit(plan, source="arrays", steps_per_epoch=None)
    if fit["epochs"] > 1:
        yield with_fit(plan, epochs=1)
    if fit["rows"] > fit["batch_size"]:
        yield with_fit(plan, rows=fit["batch_size"])
        yield with_fit(plan, rows=fit["rows"] % fit["batch_size"] or fit["batch_size"])
    yield replace(plan, form="functional")
    for name in [*plan.optimizer][1:]:
        if name != "learning_rate":
            rest = {key: value for key, value in plan.optimizer.items() if key != name}
            yield replace(plan, optimizer=rest)
    if plan.optimizer["name"] != "SGD":
        yield replace(plan, optimizer={"name": "SGD", "learning_rate": 0.1})


def with_fit(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with changed options of `fit`; None removes an option."""
    fit = {**plan.fit, **changes}
    return replace(plan, fit={name: value for name, value in fit.items() if value is not None})


def without_layer(plan: Plan, place: int) -> Plan | None:
    """Remove a layer whose output has the kind of its input."""
    value = plan.values[place]
    if not value.of or plan.values[value.of[0]].kind != value.kind:
        return None
    values = [_renamed(other, place, value.of[0]) for other in plan.values]
    outputs = [replace(o, of=value.of[0]) if o.of == place else o for o in plan.outputs]
    return without_unused(replace(plan, values=tuple(values), outputs=tuple(outputs)))


def _renamed(value: Value, old: int, new: int) -> Value:
    return replace(value, of=tuple(new if place == old else place for place in value.of))


def without_unused(plan: Plan) -> Plan:
    """Remove the values that no output needs."""
    needed: set[int] = set()
    more = [output.of for output in plan.outputs]
    while more:
        place = more.pop()
        if place not in needed:
            needed.add(place)
            more += plan.values[place].of
    places = {old: new for new, old in enumerate(sorted(needed))}
    values = tuple(
        replace(plan.values[old], of=tuple(places[place] for place in plan.values[old].of))
        for old in places
    )
    return replace(
        plan, values=values, outputs=tuple(replace(o, of=places[o.of]) for o in plan.outputs)
    )
