"""Figures and pages made from results on disk."""
