"""Tests, intervals and choices that take and return plain numbers and know nothing of studies."""
