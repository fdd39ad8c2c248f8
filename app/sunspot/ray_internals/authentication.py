"""Makes Ray read its authentication token again.

ray._raylet.AuthenticationTokenLoader   keeps the first token that this process has used. The public API cannot replace
                                        this token, although `ray.init` starts Ray's processes with a newer token.
"""


def forget_token() -> None:
    """Make this process use the token that is currently set, even if it used another token before."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # a compiled module

    AuthenticationTokenLoader.instance().reset_cache()
