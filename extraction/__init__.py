"""Prompts -> responses -> hidden-state store."""
