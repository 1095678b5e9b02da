"""Recipes: every task of the paper, on models, data formats and metrics of the ecosystem."""
