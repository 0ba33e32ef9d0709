"""Schemes side by side: trained and measured, or a released model studied under extensions."""
