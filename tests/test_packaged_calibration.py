"""Calibration on the text that ships with the package: what is drawn of it, and what is dropped."""

from __future__ import annotations
