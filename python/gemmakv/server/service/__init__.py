"""What requests to the model come to. Knows no HTTP."""
