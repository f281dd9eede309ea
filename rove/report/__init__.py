"""The report: run folders and their results as tables and plots, each section from a module."""
