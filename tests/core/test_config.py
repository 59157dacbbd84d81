"""Settings: what an environment means, and that a bad value is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sdp_plugins.core.config import Config, environment

MIB = 2**20


def test_defaults() -> None:
    assert Config.from_env({}) == Config(
        timeout_s=None,
        fusion_bytes=25 * MIB,
        register=True,
        autoload=True,
        staging_bytes=None,
        spin_us=None,
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SDP_TIMEOUT", "SDP_TIMEOUT_S"),
        ("SDP_REGISTR", "SDP_REGISTER"),
        ("SDP_JOBID", "SDP_JOB_ID"),
    ],
)
def test_a_misspelt_name_is_told(name: str, meant: str) -> None:
    text = f"no variable {name}. .* did you mean {meant}"
    for of_a_rank in ({}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, {"RANK": "x"}):
        with pytest.warns(UserWarning, match=text):
            assert Config.from_env({name: "5", **of_a_rank}) == Config()


@pytest.mark.filterwarnings("error")
def test_a_misspelt_name_is_told_once_per_job() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    assert Config.from_env({"SDP_TIMEOUT": "5", **place}) == Config()


@pytest.mark.filterwarnings("error")
def test_other_names_are_their_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    Config.from_env({"SDP_BACKEND": "flash", "SDP_LAUNCHER_PID": "1", "SDP_JOB_ID": "a"})


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("SDP_TIMEOUT_S", "10", "timeout_s", 10.0),
        ("SDP_TIMEOUT_S", " 0.25 ", "timeout_s", 0.25),
        ("SDP_TIMEOUT_S", "1e8", "timeout_s", 1e8),
        ("SDP_TIMEOUT_S", "", "timeout_s", None),
        ("SDP_FUSION_MB", "64", "fusion_bytes", 64 * MIB),
        ("SDP_FUSION_MB", "0.5", "fusion_bytes", MIB // 2),
        ("SDP_FUSION_MB", "0.0011", "fusion_bytes", 1152),
        ("SDP_REGISTER", "0", "register", False),
        ("SDP_REGISTER", "Off", "register", False),
        ("SDP_REGISTER", "yes", "register", True),
        ("SDP_AUTOLOAD", "false", "autoload", False),
        ("SDP_AUTOLOAD", "", "autoload", True),
        ("SDP_STAGING_BYTES", "65536", "staging_bytes", 65536),
        ("SDP_STAGING_BYTES", "1000000", "staging_bytes", 1003520),
        ("SDP_SPIN_US", "0", "spin_us", 0),
        ("SDP_SPIN_US", "50", "spin_us", 50),
        ("SDP_SPIN_US", "auto", "spin_us", None),
    ],
)
def test_good_values(variable: str, text: str, field: str, value: Any) -> None:
    config = Config.from_env({variable: text})
    assert getattr(config, field) == value
    assert dataclasses.replace(config, **{field: getattr(Config(), field)}) == Config()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *[("SDP_TIMEOUT_S", text) for text in ("0", "-1", "nan", "inf", "1e9", "5 s", "soon")],
        *[("SDP_FUSION_MB", text) for text in ("0", "-25", "nan", "25MB", "100000")],
        *[("SDP_REGISTER", text) for text in ("2", "maybe", "-1")],
        *[("SDP_AUTOLOAD", text) for text in ("2", "never")],
        *[("SDP_STAGING_BYTES", text) for text in ("0", "-4096", "4.5", "4M", "65535", "1" * 20)],
        *[("SDP_SPIN_US", text) for text in ("-1", "1.5", "always", "10000000")],
    ],
)
def test_bad_values_name_the_variable(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{variable}=.*Hint: ") as caught:
        Config.from_env({variable: text})
    assert repr(text) in str(caught.value)


def test_fusion_is_a_multiple_of_128() -> None:
    for text in ("0.001", "0.37", "1.23456", "24.999"):
        assert Config.from_env({"SDP_FUSION_MB": text}).fusion_bytes % 128 == 0


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout_s = 1.0  # type: ignore[misc]


def test_reads_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDP_TIMEOUT_S", "17")
    assert Config.from_env().timeout_s == 17.0
    environment()["SDP_TIMEOUT_S"] = "a copy"
    assert Config.from_env().timeout_s == 17.0
