"""Names of jobs, which are used once."""

from __future__ import annotations

import re
import secrets
import time

LONGEST = 63  # as SageMaker has it


def new_name(base: str) -> str:
    """A name that no other job has: jobs may begin within one second, in any process.

    Args:
        base: What it begins with; too long a one is cut.
    """
    stamp = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{secrets.token_hex(3)}"
    return f"{base[: LONGEST - len(stamp) - 1].rstrip('-')}-{stamp}"


def check_name(name: str) -> None:
    """See that a job may be called so.

    Raises:
        ValueError: It may not.
    """
    if not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9])*", name) or len(name) > LONGEST:
        raise ValueError(
            f"job_name {name!r}: a name has letters, digits and '-', {LONGEST} at most"
        )
