"""Jobs that run while others sleep: the toolkit does so for half a minute or a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.sagemaker.job import Ended, Job, run_job

AT_ONCE = 6
End = Callable[[str], Ended]


def started(
    jobs: Mapping[str, Job],
    toolkit: Path,
    factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[End]:
    """What a fixture yields: the job of a name, all of them having ended.

    Only those run that are the parameter `name` of a test of the session.
    """
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    asked = {call.params.get("name") for call in calls}
    with ThreadPoolExecutor(AT_ONCE) as executor:
        jobs_ended = {
            name: executor.submit(run_job, job, toolkit, factory.mktemp("job"))
            for name, job in jobs.items()
            if name in asked
        }
    yield lambda name: jobs_ended[name].result()
