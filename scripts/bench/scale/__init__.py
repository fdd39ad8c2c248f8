"""Measures figures that grow with workers, rows, time and bytes. Each module has a `measure` that yields table rows."""
