"""All uses of Ray's private APIs, checked against Ray 2.60.0. If another version has changed one, runs continue without
it and warn.

Each file has one subject, and names the private APIs that it uses and why no public API suffices. Public APIs are those
that Ray marks with `@PublicAPI` or `@DeveloperAPI` and has in a documented module. Outside this package, `make lint`
refuses imports of private ones (`banned-api` in pyproject.toml).
"""
