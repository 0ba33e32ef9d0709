"""Measures a trained model beyond its training length."""
