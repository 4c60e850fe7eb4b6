"""Helpers for testing this package and storage backends: real servers on loopback ports."""
