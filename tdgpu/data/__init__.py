"""Saves in training loops: datasets, the orders in which rows are taken, and loaders."""
