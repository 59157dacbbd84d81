"""Tests of python -m sdp_plugins.trace."""
