"""What a model is and where it comes from: shapes, files, folders, the hub."""
