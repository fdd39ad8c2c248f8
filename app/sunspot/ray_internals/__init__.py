"""All uses of Ray's private APIs, checked against Ray 2.60.0. If another version of Ray changes such an API, runs log a
warning and continue without it.

Each file covers one subject. The file's docstring lists the private APIs in use, and explains why no public API
suffices. An API is public if Ray marks it with `@PublicAPI` or `@DeveloperAPI` and defines it in a documented module.
Outside this package, `make lint` rejects imports of private APIs (`banned-api` in pyproject.toml).
"""
