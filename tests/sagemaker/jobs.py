"""Jobs whose script says what it has found."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from sdp_plugins.sagemaker import Estimator, PyTorch

PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
SHOW = """
import json, os, sys
from pathlib import Path
found = {"cwd": os.getcwd(), "arguments": sys.argv[1:], "environment": dict(os.environ)}
channel = os.environ.get("SM_CHANNEL_TRAINING")
found["data"] = channel and Path(channel, "numbers").read_text()
Path(os.environ["SM_MODEL_DIR"], os.environ.get("RANK", "alone")).write_text(json.dumps(found))
Path(os.environ["SM_OUTPUT_DATA_DIR"], "notes").write_text("noted")
"""


def folder_of_archives(estimator: Estimator, output: Path) -> Path:
    """Where the estimator's last job has left them, which is where SageMaker would."""
    assert estimator.model_data
    model = Path(estimator.model_data.removeprefix("file://"))
    assert model.relative_to(output).parts[1:] == ("output", "model.tar.gz")
    return model.parent


def fitted(tmp_path: Path, source: Path, inputs: Any = None, **options: Any) -> dict[str, Any]:
    """What the script said of every rank, by the names of its files."""
    options = {"entry_point": "show.py", "framework": PyTorch, **options}
    output = f"file://{tmp_path / 'out'}"
    estimator = options.pop("framework")(source_dir=str(source), output_path=output, **options)
    estimator.fit(inputs)
    archives = folder_of_archives(estimator, tmp_path / "out")
    with tarfile.open(archives / "model.tar.gz") as archive:
        archive.extractall(tmp_path / "model", filter="data")
    with tarfile.open(archives / "output.tar.gz") as archive:
        assert "data/notes" in archive.getnames()
    return {path.name: json.loads(path.read_text()) for path in (tmp_path / "model").iterdir()}
