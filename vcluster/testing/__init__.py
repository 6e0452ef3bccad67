"""Tests on virtual devices: what stands behind the pytest plugin, and assertions that any test may use."""

from vcluster.testing.communication import assert_communication

__all__ = ["assert_communication"]
