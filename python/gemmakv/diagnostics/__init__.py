"""Checks that a machine computes right, and measures how fast it is."""
