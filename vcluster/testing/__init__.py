"""Tests on virtual devices: the implementation of the pytest plugin, and assertions for any test."""

from vcluster.testing.communication import assert_communication

__all__ = ["assert_communication"]
