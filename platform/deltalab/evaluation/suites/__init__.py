"""Suites of evaluation tasks, each asked by the protocol of the papers that quote it."""
