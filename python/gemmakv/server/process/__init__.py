"""The server's processes: sockets, signals, workers."""
