"""Names of the cases, for a test process that does not import Keras."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

BACKENDS = ("tensorflow", "torch", "jax")
KERAS = tuple(int(part) for part in version("keras").split(".")[:2])
RUN = "from tests.keras.cases import run as main"
WITHOUT_EQUAL = {"Normalized", "Dropout", "Shuffled"}
"""Cases of which one process makes something else: it draws or normalizes over more rows."""

UNEVEN = (
    "AccumulationAndClipping",
    "LastBatchOfOne",
    "MaskedTokens",
    "Normalized",
    "NormalizedTogether",
    "OwnMetrics",
)
"""Cases that are tried on three ranks as well, which do not divide batches evenly."""
IN_ALL_VERSIONS = {
    "AccumulationAndClipping",
    "AreaUnderCurve",
    "Compiled",
    "Dataset",
    "Embedding",
    "Loader",
    "LossBySampleWeight",
    "MaskedTokens",
    "MixedPrecision",
    "MovingAverage",
    "Normalized",
    "OwnMetrics",
    "OwnStep",
    "PyDataset",
    "SampleWeight",
    "SeveralStepsPerExecution",
    "ShortLastBatch",
    "TwoOutputs",
    "Unbuilt",
    "ValidationData",
}
"""Cases that between them need every private name of Keras: run with other versions as well."""
LONG = {"CompiledToMachineCode"}
"""Cases of `make test-long`."""
TOLERANCE = {"MixedPrecision": 5e-3}
"""Of a case's numbers, where it is not 2e-5."""


def _cases() -> list[str]:
    tree = ast.parse(Path(__file__).with_name("cases.py").read_text())
    kinds = {"Case"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and kinds & {ast.unparse(base) for base in node.bases}:
            kinds.add(node.name)
    return sorted(kinds - {"Case", "Options", "Optimizer"})


CASES = _cases()


def unsupported(backend: str, case: str) -> str | None:
    """Why Keras itself has no such case on a backend."""
    if backend == "torch" and case == "SeveralStepsPerExecution":
        return "Keras has no steps_per_execution on torch"
    if backend != "torch" and case == "CompiledToMachineCode":
        return "on this backend Compiled is"
    if backend == "torch" and case.startswith("Compiled") and KERAS < (3, 12):
        return "in one process, too, torch 2.13 does not compile the steps of Keras before 3.12"
    if backend == "jax" and case == "OptimizerInDictionary":
        return "Keras on JAX knows one optimizer of a model only"
    if backend == "jax" and case == "MovingAverage":
        return "in one process, too, Keras leaves deleted arrays in the model here"
    if backend != "tensorflow" and case == "NormalizedTogether":
        return "Keras has no synchronized=True but on TensorFlow"
    if backend == "jax" and case == "ShuffledDataset":
        return "as on torch, after an import of TensorFlow"
    if backend != "tensorflow" and case in ("Dataset", "RepeatedDataset", "UnknownLength"):
        return "on this backend like any other iterable, after an import of TensorFlow"
    if backend != "torch" and case == "Loader":
        return "on this backend like any other iterable, after an import of torch"
    return None
