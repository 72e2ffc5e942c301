"""Forecasts, before a study runs, what the study costs and which effects it can find."""
