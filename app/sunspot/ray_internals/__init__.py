"""Private APIs of Ray, checked against Ray 2.60.0; where a Ray has changed one, runs do without it, with a warning.

Each file has one subject, and says why no public API does it. Public is what Ray marks with `@PublicAPI` or
`@DeveloperAPI`, and has in a module that its documentation names. `make lint` refuses imports of what is not, outside
of this package (`banned-api` in pyproject.toml).
"""
