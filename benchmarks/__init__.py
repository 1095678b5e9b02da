"""Measurements behind ndpp's claims: what a layer costs, and which settings train best."""
