"""Makes Ray read its authentication token again.

ray._raylet.AuthenticationTokenLoader   keeps the first token that this process has used. The public API cannot replace
                                        it, although `ray.init` starts Ray's processes with a newer one.
"""


def forget_token() -> None:
    """Make this process use the token that is set now, even if it has used another one, for example in a notebook."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # a compiled module

    AuthenticationTokenLoader.instance().reset_cache()
