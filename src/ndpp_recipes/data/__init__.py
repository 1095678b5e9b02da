"""Reading data as it lies on disk."""
