"""Makes Ray read its authentication token again.

ray._raylet.AuthenticationTokenLoader   keeps the first token that this process has used, although `ray.init` starts
                                        Ray's processes with the current token. No public API replaces the old token.
"""


def forget_token() -> None:
    """Make this process use the token that is currently set, even if it used another token before."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # a compiled module

    AuthenticationTokenLoader.instance().reset_cache()
