"""Networks that the libraries of the field do not have."""
