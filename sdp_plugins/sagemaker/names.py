"""Names of jobs, which are unique."""

from __future__ import annotations

import re
import secrets
import time

LONGEST = 63  # SageMaker's limit


def new_name(base: str) -> str:
    """Make a unique name, even if jobs begin within the same second.

    Args:
        base: Beginning of the name; cut if it is too long.
    """
    stamp = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{secrets.token_hex(3)}"
    return f"{base[: LONGEST - len(stamp) - 1].rstrip('-')}-{stamp}"


def check_name(name: str) -> None:
    """Check a job's name.

    Raises:
        ValueError: The name is invalid.
    """
    if not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9])*", name) or len(name) > LONGEST:
        raise ValueError(
            f"job_name {name!r}: a name has letters, digits and '-', {LONGEST} at most"
        )
