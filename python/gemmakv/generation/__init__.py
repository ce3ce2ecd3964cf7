"""A loaded model, and what it generates: options, results, streams."""
