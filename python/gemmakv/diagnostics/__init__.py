"""Whether a machine computes right, and how fast."""
