"""Small helpers of every room: arguments, files, progress."""
