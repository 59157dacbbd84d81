"""The costs of the simulated nodes' network: given or assumed."""

from __future__ import annotations

from dataclasses import replace

from sdp_plugins.core.internode.cost_model import Costs

ASSUMED = Costs(latency_s=25e-6, post_s=5e-6, message_s=50e-6, byte_s=8e-9 / 100, node_byte_s=1e-10)
"""A cluster with links of 100 Gbit/s, whose nodes reduce 10 GB/s: what eight ranks leave of
200 GB/s of memory bandwidth. These values are assumptions, not measurements."""


def described(costs: Costs) -> str:
    """Return the costs in microseconds, Gbit/s and GB/s."""
    return (
        f"latency {costs.latency_s * 1e6:.0f} us, {costs.post_s * 1e6:.1f} us for each further "
        f"message, {costs.message_s * 1e6:.0f} us under load; links of "
        f"{8e-9 / costs.byte_s:.2f} Gbit/s, nodes reduce {1e-9 / costs.node_byte_s:.2f} GB/s"
    )


def with_options(
    gbit: float | None = None,
    latency_us: float | None = None,
    message_us: float | None = None,
    node_gbs: float | None = None,
) -> Costs:
    """Return costs from the given values, in common units; the others are assumed.

    Args:
        gbit: Speed of a node's link in Gbit/s.
        latency_us: Latency of a small message, in microseconds.
        message_us: Cost of each message under load, in microseconds; posting one takes no longer.
        node_gbs: A node's reduction rate, in 1e9 bytes of a buffer per second.
    """
    costs = ASSUMED
    if gbit is not None:
        costs = replace(costs, byte_s=8e-9 / gbit)
    if latency_us is not None:
        costs = replace(costs, latency_s=latency_us * 1e-6)
    if message_us is not None:
        message_s = message_us * 1e-6
        costs = replace(costs, message_s=message_s, post_s=min(costs.post_s, message_s))
    if node_gbs is not None:
        costs = replace(costs, node_byte_s=1e-9 / node_gbs)
    return costs
