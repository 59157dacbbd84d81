"""The backend's name in `init_process_group("smddp")`."""

from __future__ import annotations

BACKEND = "smddp"
