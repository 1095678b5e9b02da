"""Normalisations to compare with."""
