"""HuggingFace's Trainer and accelerate over smddp, on CPUs.

Scripts import and call nothing. `backend_choice` patches accelerate's choice of a backend, and
`command_line` adds smddp to the choices of an option of transformers. The patches apply when
accelerate and transformers are imported, and affect only jobs that use smddp. `SDP_HUGGINGFACE=0`
disables them. See docs/huggingface.md.
"""

from __future__ import annotations

import logging
from types import ModuleType

log = logging.getLogger(__name__)


def patch(module: ModuleType) -> None:
    """Have a module of theirs know smddp; never raises, and a second time changes nothing.

    Args:
        module: `accelerate.state` or `transformers.training_args`, as it is imported.
    """
    try:
        from sdp_plugins.core.config import patches_huggingface

        if patches_huggingface():
            from sdp_plugins.huggingface import backend_choice, command_line

            place = backend_choice if module.__name__ == "accelerate.state" else command_line
            place.patch(module)
    except Exception:
        log.debug("%s was not patched", module.__name__, exc_info=True)
