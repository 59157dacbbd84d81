"""Where a job's archives are, and that none is another job's or half of one."""

from __future__ import annotations

import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sdp_plugins.sagemaker import PyTorch, TrainingJobError
from sdp_plugins.sagemaker.artifacts import pack
from sdp_plugins.sagemaker.job_folder import check_name, new_name
from tests.sagemaker.jobs import folder_of_archives

WRITE = """
import os, sys
from pathlib import Path
if "--fail" in sys.argv:
    raise SystemExit(3)
Path(os.environ["SM_MODEL_DIR"], sys.argv[2]).write_bytes(os.urandom(2_000_000))
"""


def job(tmp_path: Path, **hyperparameters: object) -> PyTorch:
    (tmp_path / "write.py").write_text(WRITE)
    return PyTorch(
        entry_point=str(tmp_path / "write.py"),
        hyperparameters=hyperparameters,
        output_path=str(tmp_path / "out"),
    )


def test_jobs_with_one_output_path_keep_their_own_models(tmp_path: Path) -> None:
    """Also those that run at the same time."""
    jobs = {str(number): job(tmp_path, number=number) for number in range(3)}
    with ThreadPoolExecutor() as pool:
        for fit in [pool.submit(estimator.fit) for estimator in jobs.values()]:
            fit.result()
    for name, estimator in jobs.items():
        out = folder_of_archives(estimator, tmp_path / "out")
        assert sorted(path.name for path in out.iterdir()) == ["model.tar.gz", "output.tar.gz"]
        with tarfile.open(out / "model.tar.gz") as model:
            assert model.getnames() == [name]


def test_a_failed_job_has_no_model_of_the_one_before(tmp_path: Path) -> None:
    estimator = job(tmp_path, number=1)
    estimator.fit(job_name="first")
    estimator.set_hyperparameters(fail=True)
    with pytest.raises(TrainingJobError):
        estimator.fit(job_name="second")
    assert estimator.model_data is None
    assert [path.name for path in (tmp_path / "out" / "second" / "output").iterdir()] == [
        "output.tar.gz"
    ]


def test_a_jobs_name_is_used_once(tmp_path: Path) -> None:
    """SageMaker refuses the second job; here it would write over the first one's model."""
    job(tmp_path, number=1).fit(job_name="mine")
    with pytest.raises(ValueError, match="job_name 'mine': there was a job of this name"):
        job(tmp_path, number=2).fit(job_name="mine")


def test_a_job_that_never_began_leaves_no_name_behind(tmp_path: Path) -> None:
    estimator = job(tmp_path, number=1)
    estimator.set_hyperparameters(wrong=object())
    with pytest.raises(ValueError, match="JSON"):
        estimator.fit(job_name="mine")
    job(tmp_path, number=1).fit(job_name="mine")


def test_without_an_output_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    estimator = job(tmp_path, number=1)
    estimator.output_path = None
    estimator.fit()
    assert folder_of_archives(estimator, tmp_path)


def test_an_archive_appears_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").touch()
    archive = tmp_path / "model.tar.gz"

    def full(*_: object, **__: object) -> None:
        assert not archive.exists()
        raise OSError("No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    with pytest.raises(OSError, match="No space"):
        pack(archive, [tmp_path / "model"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_names() -> None:
    names = {new_name("base") for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"base-\d{4}(-\d\d){5}-[0-9a-f]{6}", name) for name in names)
    check_name(new_name("x" * 80))
    with pytest.raises(ValueError, match="63 at most"):
        check_name("x" * 64)
