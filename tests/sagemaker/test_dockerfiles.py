"""The examples' Dockerfiles: what may be handed on holds no key."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "sagemaker"


@pytest.mark.parametrize("name", ["Dockerfile.pytorch", "Dockerfile.tensorflow"])
def test_the_private_key_is_in_the_last_stage_alone(name: str) -> None:
    """Whoever can pull an image reads all its layers, also what a later one removes."""
    text = (EXAMPLES / name).read_text()
    handed_on, _, last = text.rpartition("\nFROM keyless\n")
    assert "AS keyless\n" in handed_on and "ssh-keygen" not in handed_on
    assert "openssh-server" in handed_on and "/etc/ssh/ssh_host_*" in handed_on  # made by apt-get
    assert "ssh-keygen -A" in last and "id_rsa.pub" in last
    assert "private registry" in text.split("FROM")[0]
